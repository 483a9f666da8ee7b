"""Attention in blocks of queries and keys, in plain JAX: the form that runs everywhere.

The online softmax of FlashAttention (Dao et al. 2022, arXiv:2205.14135) as a scan over pairs of
blocks. Under a causal mask the pairs above the diagonal are left out of the scan, so that the
arithmetic is near half of the full product and the trip count is static. No array has two sequence
dimensions longer than a block.

Shapes: B batch, S queries, T keys, G key/value heads, R query heads for each of them, K head size,
V value head size, b block.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 512
_MASKED = -1e30  # not -inf: a fully masked block must not make exp(-inf - -inf)


def forward(
    q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGV: jax.Array, *, scale: float, q_offset: jax.Array | int = 0
) -> tuple[jax.Array, jax.Array]:
    """Causal attention.

    `q_offset` is the position of the first query among the keys: a traced value where the sequence
    is split over devices (every pair of blocks is then visited and masked).

    Returns the output `[B, S, H, V]` in the queries' dtype and the log-sum-exp of the scaled scores
    `[B, S, H]` in float32.
    """
    B, S, H, _ = q_BSHK.shape
    V = v_BTGV.shape[-1]
    q, k, v, b, pairs = _blocks(q_BSHK, k_BTGK, v_BTGV, q_offset)
    nq, _, G, R, _, _ = q.shape[0], *q.shape[1:]

    def step(carry, pair):
        out, top, total = carry
        i, j = pair
        scores = _scores(q[i], k[j], i, j, b, scale, q_offset)  # B G R b b
        old = top[i]
        new = jnp.maximum(old, scores.max(-1))
        p = jnp.exp(scores - new[..., None])
        correction = jnp.exp(old - new)
        pv = jnp.einsum("bgrst,btgv->bgrsv", p.astype(v.dtype), v[j], preferred_element_type=jnp.float32)
        out = out.at[i].set(out[i] * correction[..., None] + pv)
        return (out, top.at[i].set(new), total.at[i].set(total[i] * correction + p.sum(-1))), None

    init = (
        jnp.zeros((nq, B, G, R, b, V), jnp.float32),
        jnp.full((nq, B, G, R, b), _MASKED, jnp.float32),
        jnp.zeros((nq, B, G, R, b), jnp.float32),
    )
    with jax.named_scope("blockwise_attention"):
        (out, top, total), _ = jax.lax.scan(step, init, pairs)
    out = (out / total[..., None]).astype(q_BSHK.dtype)
    lse = top + jnp.log(total)
    return _join(out, S), jnp.moveaxis(lse, (0, 4), (1, 2)).reshape(B, nq * b, H)[:, :S]


def backward(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGV: jax.Array,
    out_BSHV: jax.Array,
    lse_BSH: jax.Array,
    dout_BSHV: jax.Array,
    *,
    scale: float,
    q_offset: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the queries, keys and values, from the output and log-sum-exp of `forward`."""
    S, T = q_BSHK.shape[1], k_BTGK.shape[1]
    q, k, v, b, pairs = _blocks(q_BSHK, k_BTGK, v_BTGV, q_offset)
    G = k_BTGK.shape[2]
    delta_BSH = jnp.einsum("bshv,bshv->bsh", out_BSHV, dout_BSHV, preferred_element_type=jnp.float32)
    split = functools.partial(_split_queries, b=b, groups=G)
    dout = split(dout_BSHV)
    lse, delta = (split(x[..., None])[..., 0] for x in (lse_BSH, delta_BSH))

    def step(carry, pair):
        dq, dk, dv = carry
        i, j = pair
        p = jnp.exp(_scores(q[i], k[j], i, j, b, scale, q_offset) - lse[i][..., None])
        dp = jnp.einsum("bgrsv,btgv->bgrst", dout[i], v[j], preferred_element_type=jnp.float32)
        ds = (p * (dp - delta[i][..., None]) * scale).astype(q.dtype)
        p = p.astype(v.dtype)
        dv_j = jnp.einsum("bgrst,bgrsv->btgv", p, dout[i], preferred_element_type=jnp.float32)
        dk_j = jnp.einsum("bgrst,bgrsk->btgk", ds, q[i], preferred_element_type=jnp.float32)
        dq_i = jnp.einsum("bgrst,btgk->bgrsk", ds, k[j], preferred_element_type=jnp.float32)
        return (dq.at[i].add(dq_i), dk.at[j].add(dk_j), dv.at[j].add(dv_j)), None

    init = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    with jax.named_scope("blockwise_attention_backward"):
        (dq, dk, dv), _ = jax.lax.scan(step, init, pairs)
    dk, dv = (jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :T] for x in (dk, dv))
    return _join(dq, S).astype(q_BSHK.dtype), dk.astype(k_BTGK.dtype), dv.astype(v_BTGV.dtype)


def _blocks(q_BSHK, k_BTGK, v_BTGV, q_offset):
    """Queries `[nq, B, G, R, b, K]`, keys and values `[nk, B, b, G, .]`, the block size, and the pairs to visit."""
    b = min(BLOCK, max(q_BSHK.shape[1], k_BTGK.shape[1]))
    q = _split_queries(q_BSHK, b=b, groups=k_BTGK.shape[2])
    k, v = (_split(x, b) for x in (k_BTGK, v_BTGV))
    i, j = np.divmod(np.arange(len(q) * len(k), dtype=np.int32), np.int32(len(k)))
    if isinstance(q_offset, int):  # a block of keys is needed when it starts before the queries' last position
        needed = j * b <= q_offset + (i + 1) * b - 1
        i, j = i[needed], j[needed]
    return q, k, v, b, (i, j)


def _split(x, b):
    """`[B, S, ...]` as `[n, B, b, ...]`, padded with zeros at the end."""
    n = -(-x.shape[1] // b)
    x = jnp.pad(x, [(0, 0), (0, n * b - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], n, b, *x.shape[2:]), 1, 0)


def _split_queries(x_BSHK, *, b, groups):
    x = _split(x_BSHK, b)
    n, B, _, H, K = x.shape
    return jnp.moveaxis(x.reshape(n, B, b, groups, H // groups, K), 2, 4)


def _join(x, length):
    """`[n, B, G, R, b, K]` back to `[B, S, H, K]`."""
    n, B, G, R, b, K = x.shape
    return jnp.moveaxis(x, (0, 4), (1, 2)).reshape(B, n * b, G * R, K)[:, :length]


def _scores(q_i, k_j, i, j, b, scale, q_offset):
    """Scaled scores `[B, G, R, b, b]` in float32 with the future masked.

    Padding keys lie after every real query, so the causal mask hides them too.
    """
    scores = jnp.einsum("bgrsk,btgk->bgrst", q_i, k_j, preferred_element_type=jnp.float32) * scale
    positions = jnp.arange(b, dtype=jnp.int32)
    visible = (q_offset + i * b + positions)[:, None] >= (j * b + positions)[None, :]
    return jnp.where(visible, scores, _MASKED)
