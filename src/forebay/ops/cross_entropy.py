"""Cross entropy of a linear head without the logits ever being whole.

`float32[tokens, vocabulary]` is the largest array of a small-batch step (4 GiB for one sequence of
8192 tokens of Llama 3.1). Two ways around it, both with gradients of their own:

- `tokens`: a scan over chunks of tokens. Each chunk's logits give, at once, its loss, its gradient
  of the hidden states and its part of the head's gradient, so that nothing is computed twice. Every
  device holds the gathered head and a float32 gradient of it.
- `vocab`: two scans over slices of the vocabulary, the first for the log-sum-exp, the second for the
  gradients. The head is gathered slice by slice and its gradient scattered slice by slice; the
  logits are computed twice.

The first is faster, the second is the one for heads too large to have whole. `choose_chunking` says
which by size.

Shapes: N tokens, D embed, V vocabulary.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from forebay.sharding import Sharding

CHUNKINGS = ("auto", "tokens", "vocab")
SCOPE = "logits"
"""The scope of everything here, by which a compiled program's buffers are known."""
CHUNK_BYTES = 256 * 2**20
"""The most that one chunk's float32 logits, or one slice of the head's float32 gradient, may take on a device."""
WHOLE_HEAD_BYTES = 2 * 2**30
"""The most that a gathered head and its float32 gradient may take for `auto` to choose `tokens`."""


def choose_chunking(requested: str, sharding: Sharding, embed: int, vocab: int, itemsize: int) -> str:
    """`tokens` or `vocab`; see the module's text."""
    if requested != "auto":
        return requested
    head_bytes = embed * (vocab // sharding.size("vocab")) * (itemsize + 4)
    return "tokens" if head_bytes <= WHOLE_HEAD_BYTES else "vocab"


def cross_entropy(
    x_BSD: jax.Array, head_DV: jax.Array, targets_BS: jax.Array, *, chunking: str, sharding: Sharding
) -> jax.Array:
    """Mean cross entropy, in nats per token, of `softmax(x @ head)` against the targets.

    Args:
        x_BSD: hidden states after the last norm, in the compute dtype.
        head_DV: output embedding; it is used in `x`'s dtype, and its gradient comes in its own.
        targets_BS: token ids; negative ones are left out of the mean.
        chunking: `tokens` or `vocab`, from `choose_chunking`.
        sharding: batch and sequence of `x`, embed and vocabulary of the head, are split by it.

    Returns:
        A float32 scalar, equal on all devices.
    """
    return _mean_loss(chunking, sharding, x_BSD, head_DV, targets_BS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mean_loss(chunking, sharding, x, head, targets):
    return _forward(chunking, sharding, x, head, targets)[0]


def _forward(chunking, sharding, x, head, targets):
    shard = _Shard.of(sharding, x, head)
    weight = 1 / jnp.maximum((targets >= 0).astype(jnp.float32).sum(), 1)
    if chunking == "tokens":
        loss, dx, dhead = shard.map(_tokens_loss_and_grads, (x, head, targets, weight), ("loss", "x", "head"))
        return loss * weight, (dx, dhead.astype(head.dtype))
    loss, lse = shard.map(_vocab_loss, (x, head, targets), ("loss", "lse"))
    return loss * weight, (x, head, targets, lse, weight)


def _backward(chunking, sharding, residuals, g):
    if chunking == "tokens":
        dx, dhead = residuals
        # the product in float32: g, rounded first, would scale every gradient by up to 0.4 % in bfloat16
        return (dx * g).astype(dx.dtype), (dhead * g).astype(dhead.dtype), None
    x, head, targets, lse, weight = residuals
    shard = _Shard.of(sharding, x, head)
    dx, dhead = shard.map(_vocab_grads, (x, head, targets, g * weight, lse), ("x", "head"))
    return dx, dhead, None


_mean_loss.defvjp(_forward, _backward)


class _Shard:
    """How the arrays of the head are split, and the collectives that follow from it."""

    def __init__(self, sharding: Sharding, vocab: int):
        self.sharding = sharding
        self.vocab_axes = sharding.mesh_axes("vocab")
        self.embed_axes = sharding.mesh_axes("embed")
        self.token_axes = (*sharding.mesh_axes("batch"), *sharding.mesh_axes("sequence"))
        self.local_vocab = vocab // sharding.size("vocab")

    @classmethod
    def of(cls, sharding, x, head):
        return cls(sharding, head.shape[1])

    def map(self, function, args, outs) -> Any:
        function = jax.named_scope(SCOPE)(functools.partial(function, self))
        if self.sharding.mesh.size == 1:
            return function(*args)
        specs = {
            "x": self.sharding.spec(("batch", "sequence", None)),
            "head": self.sharding.spec(("embed", "vocab")),
            "lse": self.sharding.spec(("batch", "sequence")),
            "loss": PartitionSpec(),
        }
        ins = (specs["x"], specs["head"], specs["lse"], specs["loss"], specs["lse"])[: len(args)]
        return jax.shard_map(
            function, mesh=self.sharding.mesh, in_specs=ins,
            out_specs=tuple(specs[o] for o in outs), check_vma=False,
        )(*args)  # fmt: skip

    def first_id(self):
        """The first token id of this device's slice of the vocabulary."""
        return self.local_vocab * _axis_index(self.sharding, self.vocab_axes)

    def gather_head(self, head):
        return jax.lax.all_gather(head, self.embed_axes, axis=0, tiled=True) if self.embed_axes else head

    def scatter_head(self, dhead):
        """Sums a head gradient over the devices that saw other tokens, leaving each its rows."""
        if self.embed_axes:
            dhead = jax.lax.psum_scatter(dhead, self.embed_axes, scatter_dimension=0, tiled=True)
        rest = tuple(a for a in self.token_axes if a not in self.embed_axes)
        return jax.lax.psum(dhead, rest) if rest else dhead

    def over_vocab(self, reduce, x):
        return reduce(x, self.vocab_axes) if self.vocab_axes else x


def _axis_index(sharding: Sharding, axes):
    index = 0
    for axis in axes:
        index = index * sharding.mesh.shape[axis] + jax.lax.axis_index(axis)
    return index


def _tokens_loss_and_grads(shard: _Shard, x_BSD, head_DV, targets_BS, weight):
    D = x_BSD.shape[-1]
    head = shard.gather_head(head_DV.astype(x_BSD.dtype))
    tokens = x_BSD.shape[0] * x_BSD.shape[1]
    chunks, size = _split(tokens, tokens * shard.local_vocab * 4)
    padding = chunks * size - tokens
    xs = jnp.pad(x_BSD.reshape(tokens, D), ((0, padding), (0, 0))).reshape(chunks, size, D)
    ts = jnp.pad(targets_BS.reshape(tokens), (0, padding), constant_values=-1).reshape(chunks, size)
    first = shard.first_id()

    def chunk(carry, inputs):
        loss, dhead = carry
        x, t = inputs
        logits = jnp.dot(x, head, preferred_element_type=jnp.float32)
        top = shard.over_vocab(jax.lax.pmax, logits.max(-1))
        exp = jnp.exp(logits - top[:, None])
        total = shard.over_vocab(jax.lax.psum, exp.sum(-1))
        picked = shard.over_vocab(jax.lax.psum, _pick(logits, t - first))
        counted = t >= 0
        loss += jnp.where(counted, top + jnp.log(total) - picked, 0.0).sum()
        dlogits = exp * jnp.where(counted, 1 / total, 0.0)[:, None] - _one_hot(t - first, logits.shape)
        dlogits = (dlogits * weight).astype(x.dtype)
        dx = shard.over_vocab(jax.lax.psum, jnp.dot(dlogits, head.T))
        dhead += jnp.dot(x.T, dlogits, preferred_element_type=jnp.float32)
        return (loss, dhead), dx

    (loss, dhead), dx = jax.lax.scan(chunk, (jnp.float32(0), jnp.zeros(head.shape, jnp.float32)), (xs, ts))
    if shard.token_axes:
        loss = jax.lax.psum(loss, shard.token_axes)
    return loss, dx.reshape(-1, D)[:tokens].reshape(x_BSD.shape), shard.scatter_head(dhead)


def _vocab_slices(shard: _Shard, x_BSD, head_DV):
    """The head's slices `[slices, D, v]`, the first id of each within the device, and how many ids are real."""
    rows = max(x_BSD.shape[0] * x_BSD.shape[1], x_BSD.shape[2])
    slices, width = _split(shard.local_vocab, rows * shard.local_vocab * 4)
    head = jnp.pad(head_DV.astype(x_BSD.dtype), ((0, 0), (0, slices * width - shard.local_vocab)))
    stacked = jnp.moveaxis(head.reshape(head.shape[0], slices, width), 1, 0)
    return stacked, jnp.arange(slices, dtype=jnp.int32) * width


def _slice_logits(shard: _Shard, x, head_slice, start):
    """Logits of one slice; those of padding columns are too low to count."""
    logits = jnp.dot(x, head_slice, preferred_element_type=jnp.float32)
    if shard.local_vocab % logits.shape[-1]:
        real = start + jnp.arange(logits.shape[-1], dtype=jnp.int32) < shard.local_vocab
        logits = jnp.where(real, logits, -1e30)
    return logits


def _vocab_loss(shard: _Shard, x_BSD, head_DV, targets_BS):
    head, starts = _vocab_slices(shard, x_BSD, head_DV)
    first = shard.first_id()
    x = x_BSD.reshape(-1, x_BSD.shape[-1])
    t = targets_BS.reshape(-1)

    def one_slice(carry, inputs):
        top, total, picked = carry
        head_slice, start = inputs
        logits = _slice_logits(shard, x, shard.gather_head(head_slice), start)
        new = jnp.maximum(top, logits.max(-1))
        total = total * jnp.exp(top - new) + jnp.exp(logits - new[:, None]).sum(-1)
        return (new, total, picked + _pick(logits, t - first - start)), None

    zeros = jnp.zeros(t.shape, jnp.float32)
    (top, total, picked), _ = jax.lax.scan(one_slice, (zeros - 1e30, zeros, zeros), (head, starts))
    highest = shard.over_vocab(jax.lax.pmax, top)
    total = shard.over_vocab(jax.lax.psum, total * jnp.exp(top - highest))
    lse = highest + jnp.log(total)
    loss = jnp.where(t >= 0, lse - shard.over_vocab(jax.lax.psum, picked), 0.0).sum()
    if shard.token_axes:
        loss = jax.lax.psum(loss, shard.token_axes)
    return loss, lse.reshape(targets_BS.shape)


def _vocab_grads(shard: _Shard, x_BSD, head_DV, targets_BS, weight, lse_BS):
    head, starts = _vocab_slices(shard, x_BSD, head_DV)
    first = shard.first_id()
    x = x_BSD.reshape(-1, x_BSD.shape[-1])
    t, lse = targets_BS.reshape(-1), lse_BS.reshape(-1)
    weights = jnp.where(t >= 0, weight, 0.0)

    def one_slice(dx, inputs):
        head_slice, start = inputs
        head_slice = shard.gather_head(head_slice)
        logits = _slice_logits(shard, x, head_slice, start)
        dlogits = jnp.exp(logits - lse[:, None]) - _one_hot(t - first - start, logits.shape)
        dlogits = (dlogits * weights[:, None]).astype(x.dtype)
        dx += jnp.dot(dlogits, head_slice.T, preferred_element_type=jnp.float32)
        dslice = jnp.dot(x.T, dlogits, preferred_element_type=jnp.float32)
        return dx, shard.scatter_head(dslice).astype(head_DV.dtype)

    dx, dhead = jax.lax.scan(one_slice, jnp.zeros(x.shape, jnp.float32), (head, starts))
    dx = shard.over_vocab(jax.lax.psum, dx).astype(x.dtype)
    dhead = jnp.moveaxis(dhead, 0, 1).reshape(head_DV.shape[0], -1)[:, : shard.local_vocab]
    return dx.reshape(x_BSD.shape), dhead


def _pick(logits, ids):
    """`logits[n, ids[n]]`, zero where the id is not in this slice."""
    inside = (ids >= 0) & (ids < logits.shape[-1])
    taken = jnp.take_along_axis(logits, jnp.clip(ids, 0, logits.shape[-1] - 1)[:, None], axis=-1)[:, 0]
    return jnp.where(inside, taken, 0.0)


def _one_hot(ids, shape):
    return (ids[:, None] == jnp.arange(shape[-1], dtype=ids.dtype)[None, :]).astype(jnp.float32)


def _split(n: int, num_bytes: int) -> tuple[int, int]:
    """Into how many parts to split `n` things of `num_bytes` together, and the size of a part: the last may be padded."""
    parts = max(1, math.ceil(num_bytes / CHUNK_BYTES))
    size = -(-n // parts)
    return -(-n // size), size
