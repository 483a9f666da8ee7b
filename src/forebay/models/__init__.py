"""Models in plain JAX: weights are dataclass pytrees, a model is a few functions."""
