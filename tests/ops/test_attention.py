"""Attention against the definition: softmax of masked scores, written out in float64."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from forebay.errors import UserError
from forebay.ops.attention import KernelChoice, attention, blockwise, choose_kernel, cudnn
from forebay.sharding import single_device

SCALE = 0.3
BLOCK = 8
MESHES = ["fsdp=8", "fsdp=4,tensor=2", "data=2,sequence=4", "fsdp=2,sequence=2,tensor=2", "data=2,expert=2,tensor=2"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", BLOCK)


def definition(q: Any, k: Any, v: Any, dout: Any, offset: Any = 0):
    """Output, log-sum-exp and the gradients of q, k, v; the query at row i sees the keys up to i + offset."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    kv_heads, repeat = k.shape[2], q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, repeat, axis=2) for x in (k, v))
    scores = SCALE * np.einsum("bshk,bthk->bhst", q, k)
    past = np.arange(q.shape[1])[:, None] + offset >= np.arange(k.shape[1])[None, :]
    scores = np.where(past, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    lse = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
    p = np.exp(scores - lse)
    dp = np.einsum("bshv,bthv->bhst", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * SCALE
    dk, dv = np.einsum("bhst,bshk->bthk", ds, q), np.einsum("bhst,bshv->bthv", p, dout)
    dk, dv = (x.reshape(*x.shape[:2], kv_heads, repeat, -1).sum(3) for x in (dk, dv))
    out = np.einsum("bhst,bthv->bshv", p, v)
    return out, np.moveaxis(lse[..., 0], 1, 2), np.einsum("bhst,bthk->bshk", ds, k), dk, dv


def example(seq, heads=4, kv_heads=2, key_dim=4, value_dim=4, batch=2, dtype: Any = jnp.float32):
    random = np.random.default_rng(seq)
    shapes = [
        (batch, seq, heads, key_dim), (batch, seq, kv_heads, key_dim),
        (batch, seq, kv_heads, value_dim), (batch, seq, heads, value_dim),
    ]  # fmt: skip
    return [jnp.asarray(random.normal(size=s), dtype) for s in shapes]


def forward_and_backward(q, k, v, dout, offset=0):
    out, lse = blockwise.forward(q, k, v, scale=SCALE, q_offset=offset)
    return out, lse, *blockwise.backward(q, k, v, out, lse, dout, scale=SCALE, q_offset=offset)


quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
_run = quick_jit(forward_and_backward, static_argnames="offset")


def assert_close(actual, expected, tolerance):
    for what, a, e in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        difference = np.abs(np.asarray(a, np.float64) - e).max()
        assert difference <= tolerance * max(np.abs(e).max(), 1.0), f"{what}: {difference}"


@pytest.mark.parametrize("seq", [1, BLOCK, 3 * BLOCK + 5])
def test_equals_the_definition_for_every_length(seq):
    args = example(seq)
    assert_close(_run(*args), definition(*args), 2e-6)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim"),
    [(4, 4, 4, 4), (6, 2, 4, 4), (4, 1, 4, 4), (4, 2, 8, 3)],
    ids=["multi-head", "grouped", "multi-query", "value size differs"],
)
def test_equals_the_definition_for_every_kind_of_heads(heads, kv_heads, key_dim, value_dim):
    args = example(2 * BLOCK + 3, heads, kv_heads, key_dim, value_dim)
    assert_close(_run(*args), definition(*args), 2e-6)


def test_first_query_sees_only_the_first_value():
    q, k, v, _ = example(BLOCK + 1, heads=2, kv_heads=2)
    out, lse = blockwise.forward(q, k, v, scale=SCALE)
    np.testing.assert_allclose(out[:, 0], v[:, 0], rtol=1e-6)
    np.testing.assert_allclose(lse[:, 0], SCALE * (q[:, 0] * k[:, 0]).sum(-1), rtol=1e-5)


def test_scores_far_beyond_the_range_of_exp():
    q, k, v, dout = example(2 * BLOCK + 1)
    args = (q * 1000, k, v, dout)
    assert np.abs(definition(*args)[1]).max() > 1000  # exp overflows at 89
    assert_close(_run(*args), definition(*args), 2e-4)


def test_bfloat16_stays_within_its_rounding():
    args = example(2 * BLOCK + 3, dtype=jnp.bfloat16)
    out, lse, *grads = _run(*args)
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 3
    assert_close((out, lse, *grads), definition(*args), 2e-2)


@pytest.mark.parametrize("traced", [False, True], ids=["known offset", "traced offset"])
def test_queries_that_start_later_in_the_sequence(traced):
    q, k, v, dout = example(4 * BLOCK)
    whole = definition(q, k, v, dout)
    run = quick_jit(forward_and_backward) if traced else _run
    part = 12  # not a multiple of the block
    dk, dv = np.zeros(k.shape), np.zeros(v.shape)
    for start in (0, 12, 20):
        rows = slice(start, start + part)
        out, lse, dq, dk_part, dv_part = run(q[:, rows], k, v, dout[:, rows], offset=start)
        expected = definition(q[:, rows], k, v, dout[:, rows], start)
        assert_close((out, lse, dq, dk_part, dv_part), expected, 2e-6)
        np.testing.assert_allclose(out, whole[0][:, rows], atol=2e-6)
        dk, dv = dk + dk_part, dv + dv_part
    # rows 20 to 24 were visited twice: without them the parts make up the whole
    twice = definition(q[:, 20:24], k, v, dout[:, 20:24], 20)
    np.testing.assert_allclose(dk - twice[3], whole[3], atol=1e-5)
    np.testing.assert_allclose(dv - twice[4], whole[4], atol=1e-5)


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_pairs_of_blocks_above_the_diagonal_are_not_visited(equations, blocks):
    q, k, v, dout = example(blocks * BLOCK - 1)
    lengths = [e.params["length"] for e in equations(forward_and_backward, q, k, v, dout) if e.primitive.name == "scan"]
    assert lengths == [blocks * (blocks + 1) // 2] * 2  # forward and backward


def test_no_array_has_two_sequence_dimensions(equations):
    seq = 4 * BLOCK  # no other dimension is that long
    q, k, v, _ = example(seq, batch=1)

    def loss(q, k, v):
        return attention(q, k, v, kernel="blockwise", sharding=single_device(), scale=SCALE).sum()

    found = equations(jax.grad(loss, argnums=(0, 1, 2)), q, k, v)
    assert len(found) > 50
    for eqn in found:
        for var in eqn.outvars:
            assert sum(n >= seq for n in var.aval.shape) <= 1, eqn
            assert var.aval.size < seq * seq * 4, eqn  # nor one that holds a score per pair of positions


@pytest.mark.parametrize("mesh", MESHES)
def test_split_over_devices_equals_one_device(sharding_of, mesh):
    q, k, v, dout = example(4 * BLOCK, batch=8)
    sharding = sharding_of(mesh)

    def run(q, k, v, dout):
        out, pull = jax.vjp(
            lambda q, k, v: attention(q, k, v, kernel="blockwise", sharding=sharding, scale=SCALE), q, k, v
        )
        return out, *pull(dout)

    queries = sharding.named(("batch", "sequence", "heads", None))
    keys = sharding.named(("batch", "sequence", "kv_heads", None))
    split = quick_jit(run, in_shardings=(queries, keys, keys, queries), out_shardings=(queries, queries, keys, keys))
    out, *grads = split(q, k, v, dout)
    assert out.sharding.spec == queries.spec
    out64, lse64, *grads64 = definition(q, k, v, dout)
    assert_close((out, lse64, *grads), (out64, lse64, *grads64), 2e-6)


@pytest.mark.parametrize(("kept", "loops"), [((), 3), (("context",), 2)], ids=["recomputed", "kept"])
def test_keeping_the_context_spares_the_second_forward_pass(equations, kept, loops):
    q, k, v, _ = example(2 * BLOCK)
    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    block = jax.checkpoint(
        lambda q, k, v: attention(q, k, v, kernel="blockwise", sharding=single_device(), scale=SCALE), policy=policy
    )

    def loss(q):
        return (block(jnp.sin(q), k, v) ** 2).sum()

    assert sum(e.primitive.name == "scan" for e in equations(jax.grad(loss), q)) == loops


SIZES = {"seq": 4096, "head_dim": 128, "v_head_dim": 128, "dtype": jnp.bfloat16, "sequence_parallel": False}


class CompileOnlyPyClient:
    """The name by which a client that only compiles is known."""


@dataclasses.dataclass
class Device:
    platform: str
    compute_capability: str = ""
    client: Any = dataclasses.field(default_factory=CompileOnlyPyClient)


A100, H200, GB200, GB300, RTX = (Device("gpu", c) for c in ("8.0", "9.0", "10.0", "10.3", "12.0"))
CPU, TPU = Device("cpu"), Device("tpu")
LATENT = {"head_dim": 192, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("device", "sizes", "kernel"),
    [
        (CPU, {}, "blockwise"),
        (TPU, {}, "splash"),
        (TPU, {"seq": 4000}, "blockwise"),
        (TPU, {"head_dim": 96, "v_head_dim": 96}, "blockwise"),
        (TPU, LATENT, "splash"),
        (TPU, {"sequence_parallel": True}, "blockwise"),
        (A100, {}, "cudnn"),
        (H200, {}, "cudnn"),
        (GB200, {}, "cudnn"),
        (RTX, {}, "cudnn"),
        (H200, {"dtype": jnp.float32}, "blockwise"),
        (H200, {"head_dim": 60, "v_head_dim": 60}, "blockwise"),
        (H200, {"head_dim": 256, "v_head_dim": 256}, "cudnn"),
        (GB200, {"head_dim": 256, "v_head_dim": 256}, "blockwise"),
        (A100, LATENT, "blockwise"),
        (H200, LATENT, "cudnn"),
        (GB200, LATENT, "cudnn"),
        (GB300, LATENT, "cudnn"),
        (RTX, LATENT, "blockwise"),
        (GB200, {"head_dim": 128, "v_head_dim": 192}, "blockwise"),
        (H200, {"sequence_parallel": True}, "blockwise"),
    ],
)
def test_the_best_kernel_of_the_device_is_chosen(device, sizes, kernel):
    choice = choose_kernel("auto", device, **SIZES | sizes)
    assert choice.name == kernel
    assert (choice.note is None) == (kernel != "blockwise" or device is CPU)


@pytest.mark.parametrize(
    ("version", "sizes", "kernel"),
    [
        (91200, {}, "cudnn"),
        (91200, LATENT, "cudnn"),
        (90800, {}, "cudnn"),
        (90800, LATENT, "blockwise"),
        (None, {}, "blockwise"),
    ],
)
def test_on_a_gpu_that_is_there_the_installed_cudnn_decides(monkeypatch, version, sizes, kernel):
    def installed():
        if version is None:
            raise RuntimeError("cuDNN is not detected.")
        return version

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", installed)
    present = dataclasses.replace(H200, client=object())
    choice = choose_kernel("auto", present, **SIZES | sizes)
    assert choice.name == kernel
    assert (choice.note is None) == (kernel == "cudnn")


def test_blockwise_can_be_asked_for_anywhere():
    for device in (CPU, H200, TPU):
        assert choose_kernel("blockwise", device, **SIZES) == KernelChoice("blockwise")


@pytest.mark.parametrize(
    ("kernel", "device", "sizes", "says"),
    [
        ("flash", CPU, {}, "blockwise"),
        ("cudn", CPU, {}, "did you mean 'cudnn'"),
        ("cudnn", CPU, {}, "attention=auto"),
        ("cudnn", TPU, {}, "NVIDIA"),
        ("cudnn", H200, {"sequence_parallel": True}, "sequence"),
        ("cudnn", H200, {"dtype": jnp.float32}, "float32"),
        ("cudnn", A100, LATENT, "heads of 192 and 128 in bfloat16 on a GPU of compute capability 8.0"),
        ("splash", H200, {}, "TPU"),
        ("splash", TPU, {"seq": 4000}, "4000"),
    ],
)
def test_a_kernel_that_cannot_be_is_refused_in_one_line(kernel, device, sizes, says):
    with pytest.raises(UserError) as error:
        choose_kernel(kernel, device, **SIZES | sizes)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value_dim", [128, 64])
def test_cudnns_kernels_are_called_forward_and_backward_with_what_they_need(value_dim):
    """Traced only: shapes and dtypes of the two primitives, which jax gives other parameters from release to release."""
    q, k, v, dout = (
        jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
        for x in example(16, heads=4, kv_heads=2, key_dim=128, value_dim=value_dim)
    )
    out, lse = jax.eval_shape(functools.partial(cudnn.forward, scale=SCALE), q, k, v)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (dout.shape, jnp.bfloat16, (2, 16, 4), jnp.float32)
    found = jax.eval_shape(functools.partial(cudnn.backward, scale=SCALE), q, k, v, out, lse, dout)
    assert [(g.shape, g.dtype) for g in found] == [(x.shape, x.dtype) for x in (q, k, v)]
