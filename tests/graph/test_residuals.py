"""Which activations a backward pass needs, worked out by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from forebay.graph.residuals import block_names, input_names, residuals
from forebay.models.llama import Llama, LlamaConfig
from forebay.sharding import single_device

BATCH, SEQ = 2, 16
_LLAMA = Llama("tiny", LlamaConfig(vocab=32, embed=8, layers=3, heads=4, kv_heads=2, head_dim=6, mlp=10))

WEIGHT = jax.ShapeDtypeStruct((4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((2, 4), jnp.float32)
X_BYTES = 2 * 4 * 4


def llama_names(dtype):
    example = _LLAMA.example_blocks(BATCH, SEQ, dtype, single_device(), "blockwise")["layers"]
    return block_names(example.block, example.layer, example.x, *example.constants)


@pytest.mark.parametrize(("dtype", "size"), [(jnp.float32, 4), (jnp.bfloat16, 2)])
def test_the_activations_of_llama(dtype, size):
    names = llama_names(dtype)
    tokens = BATCH * SEQ
    assert names.residual_bytes == {
        "decoder_layer_input": tokens * 8 * size,
        "query_proj": tokens * 4 * 6 * size,
        "key_proj": tokens * 2 * 6 * size,
        "value_proj": tokens * 2 * 6 * size,
        "context": tokens * 4 * 6 * size + tokens * 4 * 4,  # the output and the float32 log-sum-exp
        "out_proj": tokens * 8 * size,
        "mlpwi_0": tokens * 10 * size,
        "mlpwi_1": tokens * 10 * size,
    }
    # the last product is added to the stream and nothing looks at it again
    assert names.not_residuals == ("mlpwo",)
    assert names.inputs == ("decoder_layer_input",)
    assert names.carried == (*names.residual_bytes, "mlpwo")


def test_a_block_whose_output_is_named_keeps_nothing_by_that_name():
    names = block_names(lambda w, x: checkpoint_name(jnp.sin(x @ w), "out"), WEIGHT, X)
    assert names.carried == ("out",)
    assert names.residual_bytes == {}
    assert names.not_residuals == ("out",)


def test_a_value_that_only_a_linear_function_uses_is_not_kept():
    def block(w, x):
        linear = checkpoint_name(x @ w, "linear")  # 2 * linear has a gradient that does not depend on it
        return jnp.sin(checkpoint_name(2 * linear, "angle"))

    names = block_names(block, WEIGHT, X)
    assert names.carried == ("linear", "angle")
    # alone, `linear` is kept to make the angle of again, without the product
    assert names.residual_bytes == {"linear": X_BYTES, "angle": X_BYTES}
    kept = jax.checkpoint_policies.save_only_these_names("linear", "angle")
    found = residuals(jax.checkpoint(block, policy=kept, prevent_cse=False), WEIGHT, X)
    assert [r.name for r in found if r.name] == ["angle"]


def test_the_input_is_known_as_an_argument_and_by_its_name():
    def block(w, x):
        return jnp.sin(checkpoint_name(x, "input") @ w)

    assert input_names(block, WEIGHT, X) == ("input",)
    full = residuals(jax.checkpoint(block, prevent_cse=False), WEIGHT, X)
    assert [(r.name, r.argument, r.num_bytes) for r in full] == [(None, 0, 4 * 4 * 4), (None, 1, X_BYTES)]


def test_a_name_for_something_computed_is_not_one_of_the_input():
    assert input_names(lambda w, x: jnp.sin(checkpoint_name(2 * x, "scaled") @ w), WEIGHT, X) == ()
    assert input_names(lambda w, x: jnp.sin(x @ checkpoint_name(w, "weight")), WEIGHT, X) == ()


def test_without_a_checkpoint_everything_that_differentiation_needs_is_kept():
    found = residuals(lambda w, x: jnp.sin(x @ w), WEIGHT, X)
    assert sorted((r.argument is None, r.num_bytes) for r in found) == [
        (False, X_BYTES), (False, 4 * 4 * 4), (True, X_BYTES),  # the input, the weight, the cosine
    ]  # fmt: skip


def test_a_name_inside_a_nested_jit():
    @jax.jit
    def inner(w, x):
        return jnp.sin(checkpoint_name(x @ w, "inside"))

    names = block_names(lambda w, x: x + inner(w, x), WEIGHT, X)
    assert names.carried == ("inside",)
    assert names.residual_bytes == {"inside": X_BYTES}


def test_a_name_inside_a_loop_counts_every_iteration():
    def block(w, x):
        def step(x, _):
            return jnp.sin(checkpoint_name(x @ w, "inside")), None

        return jax.lax.scan(step, x, None, length=5)[0]

    names = block_names(block, WEIGHT, X)
    assert names.carried == ("inside",)
    assert names.residual_bytes == {"inside": 5 * X_BYTES}


def test_a_name_inside_a_custom_derivative():
    @jax.custom_vjp
    def double_sine(x):
        return 2 * jnp.sin(x)

    def forward(x):
        cosine = checkpoint_name(jnp.cos(x), "cosine")
        return 2 * jnp.sin(x), cosine

    double_sine.defvjp(forward, lambda cosine, d: (2 * cosine * d,))
    names = block_names(lambda w, x: double_sine(x @ w), WEIGHT, X)
    assert names.carried == ("cosine",)
    assert names.residual_bytes == {"cosine": X_BYTES}


def test_two_values_of_one_name_count_together():
    def block(w, x):
        return jnp.sin(checkpoint_name(x @ w, "h")) * jnp.sin(checkpoint_name(x @ w.T, "h"))

    names = block_names(block, WEIGHT, X)
    assert names.carried == ("h",)
    assert names.residual_bytes == {"h": 2 * X_BYTES}


def test_nothing_named():
    names = block_names(lambda w, x: jnp.sin(x @ w), WEIGHT, X)
    assert (names.carried, names.residual_bytes, names.inputs, names.not_residuals) == ((), {}, (), ())
