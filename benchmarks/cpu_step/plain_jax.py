"""The same model as a plain JAX training loop, written as one would by hand: the thing to be no slower than.

No checkpointing, `jax.nn.dot_product_attention`, whole logits, `optax.adamw`. Prints the seconds of each
step as JSON.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import optax


def init(key, a):
    shapes = {
        "wq": (a.embed, a.heads, a.head_dim), "wk": (a.embed, a.heads, a.head_dim), "wv": (a.embed, a.heads, a.head_dim),
        "wo": (a.heads, a.head_dim, a.embed), "gate": (a.embed, a.mlp), "up": (a.embed, a.mlp), "down": (a.mlp, a.embed),
    }  # fmt: skip
    keys = iter(jax.random.split(key, len(shapes) + 2))
    layers = {n: 0.02 * jax.random.normal(next(keys), (a.layers, *s)) for n, s in shapes.items()}
    layers |= {"norm1": jnp.ones((a.layers, a.embed)), "norm2": jnp.ones((a.layers, a.embed))}
    return {
        "embed": 0.02 * jax.random.normal(next(keys), (a.vocab, a.embed)),
        "layers": layers,
        "norm": jnp.ones(a.embed),
        "head": 0.02 * jax.random.normal(next(keys), (a.embed, a.vocab)),
    }


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def rope(x):
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 500_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def layer(x, w):
    h = norm(x, w["norm1"])
    q, k, v = (jnp.einsum("bsd,dhk->bshk", h, w[n]) for n in ("wq", "wk", "wv"))
    o = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
    x = x + jnp.einsum("bshk,hkd->bsd", o, w["wo"])
    h = norm(x, w["norm2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None


def loss(params, inputs, targets):
    x, _ = jax.lax.scan(layer, params["embed"][inputs], params["layers"])
    logits = norm(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def main():
    parser = argparse.ArgumentParser()
    for name in ("layers", "embed", "heads", "head_dim", "mlp", "vocab", "batch", "seq", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    a = parser.parse_args()
    params = init(jax.random.key(0), a)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, inputs, targets):
        value, grads = jax.value_and_grad(loss)(params, inputs, targets)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    step = jax.jit(step, donate_argnums=(0, 1))
    tokens = jax.random.randint(jax.random.key(1), (a.batch, a.seq + 1), 0, a.vocab)
    seconds = []
    for _ in range(a.steps):
        start = time.perf_counter()
        params, state, value = step(params, state, tokens[:, :-1], tokens[:, 1:])
        value.block_until_ready()
        seconds.append(time.perf_counter() - start)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
