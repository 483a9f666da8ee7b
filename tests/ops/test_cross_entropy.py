"""The chunked loss against the definition: minus the mean log-softmax at the targets, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forebay.ops import cross_entropy as module
from forebay.ops.cross_entropy import choose_chunking, cross_entropy
from forebay.sharding import Sharding, single_device

CHUNKINGS = ["tokens", "vocab"]
B, S, D, V = 8, 4, 16, 48
MESHES = [
    "data=8", "fsdp=8", "sequence=4", "tensor=8", "data=2,fsdp=2,tensor=2",
    "fsdp=2,sequence=2,tensor=2", "data=2,expert=2,sequence=2",
]  # fmt: skip


def definition(x, head, targets):
    """Loss and the gradients of x and head."""
    x, head, targets = np.asarray(x, np.float64), np.asarray(head, np.float64), np.asarray(targets)
    logits = x @ head
    logits -= logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    target = np.eye(head.shape[1])[np.maximum(targets, 0)] * (targets >= 0)[..., None]
    count = max((targets >= 0).sum(), 1)
    dlogits = (np.exp(log_p) * (targets >= 0)[..., None] - target) / count
    return -(log_p * target).sum() / count, dlogits @ head.T, np.einsum("bsd,bsv->dv", x, dlogits)


def example(ignored=0.25, dtype=jnp.float32, shape=(B, S, D, V)):
    b, s, d, v = shape
    random = np.random.default_rng(1)
    targets = random.integers(0, v, size=(b, s))
    targets[random.random((b, s)) < ignored] = -1
    x, head = random.normal(size=(b, s, d)), random.normal(size=(d, v))
    return jnp.asarray(x, dtype), jnp.asarray(head, jnp.float32), jnp.asarray(targets, jnp.int32)


def ours(chunking, sharding=None):
    loss = functools.partial(cross_entropy, chunking=chunking, sharding=sharding or single_device())
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), compiler_options=options)


def assert_close(actual, expected, tolerance=2e-6):
    loss, (dx, dhead) = actual
    for what, a, e in zip(("loss", "dx", "dhead"), (loss, dx, dhead), expected, strict=True):
        difference = np.abs(np.asarray(a, np.float64) - e).max()
        assert difference <= tolerance * np.abs(e).max() + 1e-12, f"{what}: {difference}"


def chunks_of(monkeypatch, parts):
    """At least `parts` chunks of the example's logits, of which there are B * S * V in float32."""
    monkeypatch.setattr(module, "CHUNK_BYTES", B * S * V * 4 // parts)


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("parts", [1, 3, 16])
def test_equals_the_definition_for_every_chunk_size(monkeypatch, chunking, parts):
    chunks_of(monkeypatch, parts)
    args = example()
    assert_close(ours(chunking)(*args), definition(*args))


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_uniform_logits_cost_the_logarithm_of_the_vocabulary(chunking):
    x, head, targets = example(ignored=0)
    loss, _ = ours(chunking)(x, jnp.zeros_like(head), targets)
    assert loss == pytest.approx(np.log(V), rel=1e-6)


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_ignored_tokens_have_no_gradient_whatever_their_negative_id(chunking):
    x, head, targets = example(ignored=0)
    targets = targets.at[:, 1].set(-1).at[:, 2].set(-100)
    actual = ours(chunking)(x, head, targets)
    assert_close(actual, definition(x, head, targets))
    assert not np.asarray(actual[1][0][:, 1:3]).any()
    assert np.asarray(actual[1][0][:, 3]).all()


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_nothing_to_predict_is_a_loss_of_zero(chunking):
    x, head, targets = example(ignored=1.1)
    loss, (dx, dhead) = ours(chunking)(x, head, targets)
    assert loss == 0
    assert not np.asarray(dx).any()
    assert not np.asarray(dhead).any()


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_logits_far_beyond_the_range_of_exp(monkeypatch, chunking):
    chunks_of(monkeypatch, 4)
    x, head, targets = example()
    args = (x * 1000, head, targets)
    assert_close(ours(chunking)(*args), definition(*args), 2e-4)  # of logits near 10^4 to 7 digits


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_tied_embeddings_get_the_gradient_of_the_transposed_head(chunking):
    x, head, targets = example()
    embedding = head.T

    def loss(x, embedding):
        return cross_entropy(x, embedding.T, targets, chunking=chunking, sharding=single_device())

    value, (dx, dembedding) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, embedding)
    assert dembedding.shape == (V, D)
    assert_close((value, (dx, dembedding.T)), definition(x, head, targets))


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_the_upstream_cotangent_scales_the_gradients(chunking):
    x, head, targets = example()

    def loss(x, head):
        return -3.0 * cross_entropy(x, head, targets, chunking=chunking, sharding=single_device())

    dx, dhead = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, head)
    value, dx64, dhead64 = definition(x, head, targets)
    assert_close((value, (dx, dhead)), (value, -3 * dx64, -3 * dhead64))


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_bfloat16_hidden_states_with_float32_head(chunking):
    x, head, targets = example(dtype=jnp.bfloat16)
    actual = ours(chunking)(x, head, targets)
    assert actual[0].dtype == jnp.float32
    assert [g.dtype for g in actual[1]] == [jnp.bfloat16, jnp.float32]
    rounded = head.astype(jnp.bfloat16)  # the head is used in the dtype of the hidden states
    assert_close(actual, definition(x, rounded, targets), 1e-2)


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_bfloat16_does_not_bias_the_scale_of_the_gradients(chunking):
    # 1 / 240 is 0.34 % away from the nearest bfloat16
    x, head, targets = example(ignored=0, dtype=jnp.bfloat16, shape=(1, 240, D, V))

    @jax.jit
    @jax.grad
    def gradient(x, factor):
        return factor * cross_entropy(x, head, targets, chunking=chunking, sharding=single_device())

    mean, total = (np.asarray(gradient(x, jnp.float32(factor)), np.float64) for factor in (1, 240))
    assert (240 * mean * total).sum() / (total * total).sum() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("mesh", MESHES)
def test_split_over_devices_equals_one_device(monkeypatch, sharding_of, chunking, mesh):
    chunks_of(monkeypatch, 12)
    x, head, targets = example()
    sharding: Sharding = sharding_of(mesh)
    args = [
        jax.device_put(x, sharding.named(("batch", "sequence", None))),
        jax.device_put(head, sharding.named(("embed", "vocab"))),
        jax.device_put(targets, sharding.named(("batch", "sequence"))),
    ]
    actual = ours(chunking, sharding)(*args)
    assert_close(actual, definition(x, head, targets))
    assert actual[1][1].sharding.is_equivalent_to(args[1].sharding, 2)


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_float32_logits_are_never_whole(monkeypatch, equations, chunking):
    shape = (4, 16, 2, 256)  # 64 tokens and a small model: nothing else is as large as the logits
    tokens, vocab = 64, 256
    monkeypatch.setattr(module, "CHUNK_BYTES", tokens * vocab * 4 // 8)
    x, head, targets = example(shape=shape)

    def largest(loss):
        return max(v.aval.size for e in equations(jax.grad(loss, argnums=(0, 1)), x, head) for v in e.outvars)

    chunked = largest(lambda x, h: cross_entropy(x, h, targets, chunking=chunking, sharding=single_device()))
    assert largest(lambda x, h: jax.nn.log_softmax(x @ h).sum()) == tokens * vocab  # the walk would see whole logits
    assert chunked == tokens * vocab // 8


@pytest.mark.parametrize(
    ("mesh", "chosen"),
    [("tensor=1", "vocab"), ("tensor=2", "vocab"), ("tensor=4", "tokens"), ("fsdp=8", "vocab")],
)
def test_auto_goes_by_the_size_of_the_gathered_head(sharding_of, mesh, chosen):
    # Llama 3.1 405B: 16384 x 128256 x (2 + 4) bytes = 11.7 GiB over the tensor axis, with a limit of 2 GiB;
    # a head of a quarter of that is 2.9 GiB, and tensor=4 brings the 8B model's 2.9 GiB to 0.7
    embed = {"tensor=4": 4096}.get(mesh, 16384)
    assert choose_chunking("auto", sharding_of(mesh), embed, 128256, 2) == chosen


def test_a_chunking_asked_for_is_taken(sharding_of):
    assert choose_chunking("vocab", sharding_of("fsdp=1"), 8, 8, 2) == "vocab"
    assert choose_chunking("tokens", sharding_of("fsdp=1"), 16384, 128256, 2) == "tokens"
