"""A plan never changes a number of llama: every preset and random plans against the plain `lax.scan`."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import assert_same, placements, plain, quick_jit

from forebay.models.llama import LlamaConfig, RopeScaling
from forebay.models.llama import model as llama
from forebay.offload import scan_layers
from forebay.planner.placement import PRESETS, parse_placement
from forebay.sharding import single_device

_LLAMA = LlamaConfig(vocab=32, embed=16, layers=3, heads=4, kv_heads=2, head_dim=4, mlp=24, rope_scaling=RopeScaling())
_BATCH = {
    "inputs": jnp.asarray(np.random.default_rng(5).integers(0, 32, (2, 8)), jnp.int32),
    "targets": jnp.asarray(np.random.default_rng(6).integers(-1, 32, (2, 8)), jnp.int32),
}


@functools.cache
def _llama_weights():
    weights = llama.init(jax.random.key(0), _LLAMA)
    return jax.tree.map(lambda w: 5 * w if w.ndim > 2 else w, weights)  # far enough from zero to be nonlinear


def run_llama(scan):
    def loss(weights):
        return llama.loss(
            weights, _BATCH, config=_LLAMA, sharding=single_device(), kernel="blockwise", chunking="tokens",
            scan_layers=scan, dtype=jnp.float32,
        )  # fmt: skip

    return quick_jit(jax.value_and_grad(loss))(_llama_weights())


@functools.cache
def _llama_reference():
    return run_llama(lambda block, x, layers, *constants, stack: plain(block, x, layers, *constants))


def check_llama(plan):
    def scan(block, x, layers, *constants, stack):
        return scan_layers(block, plan, x, layers, *constants)

    assert_same(run_llama(scan), _llama_reference())


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains_llama_alike(preset):
    check_llama(parse_placement(preset, _LLAMA.stacks, {"layers": llama.ACTIVATIONS}))


@hypothesis.settings(max_examples=3)
@hypothesis.given(data=st.data())
def test_random_plans_train_llama_alike(data):
    check_llama(data.draw(placements(_LLAMA.layers, llama.ACTIVATIONS)))


@pytest.mark.slow
@hypothesis.settings(max_examples=100)
@hypothesis.given(data=st.data())
def test_many_random_plans_train_llama_alike(data):
    check_llama(data.draw(placements(_LLAMA.layers, llama.ACTIVATIONS)))
