"""Four ways to multiply each row with its expert's matrix, compiled for one GB200 that is not there.

    .venv/bin/python benchmarks/deepseek/grouped.py

The sizes are those of a DeepSeek-V3 layer on one of 8 devices of experts, with 8 sequences of 4096 tokens: 294,912
rows (1.125 times the balanced load) of 7168, 32 matrices of 7168 x 2048, bfloat16. Each compiles the product and its two
gradients. `ragged_dot` is `jax.lax.ragged_dot`; `slots` gathers each expert's rows into 1.25 times the balanced number of
slots and multiplies in a batch (rows beyond that would be dropped); `blockwise` and `triton` are forebay's. Writes
`grouped.md` beside this file.
"""

import os
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forebay.hardware import get_hardware
from forebay.ops.moe import blockwise, triton
from forebay.xla.flops import FlopCounter
from forebay.xla.hlo import parse_module
from forebay.xla.options import compiler_options
from forebay.xla.topology import compile_only_devices

D, E, F = 7168, 32, 2048
BALANCED = 8 * 4096 * 8
ROWS = BALANCED * 9 // 8
SLOTS = BALANCED // E * 5 // 4


def ours(kernel):
    return lambda x, w, h, sizes: (kernel.into(x, w, sizes), kernel.out_of(h, w, sizes), kernel.outer(x, h, sizes))


def with_vjp(product):
    def run(x, w, h, sizes):
        out, vjp = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
        return (out, *vjp(h))

    return run


def ragged(x, w, sizes):
    return jax.lax.ragged_dot(x, jnp.swapaxes(w, 0, 1), sizes)


def slots(x, w, sizes):
    start = jnp.cumsum(sizes) - sizes
    index = start[:, None] + jnp.arange(SLOTS)
    filled = jnp.arange(SLOTS) < sizes[:, None]
    rows = jnp.where(filled[..., None], x[jnp.minimum(index, len(x) - 1)], 0)
    out = jnp.einsum("esd,def->esf", rows, w)
    index = jnp.where(filled, index, len(x))  # what is not filled goes nowhere
    return jnp.zeros((len(x), F), x.dtype).at[index].set(out, mode="drop")


WAYS = {
    "triton": ours(triton),
    "blockwise": ours(blockwise),
    "slots": with_vjp(slots),
    "ragged_dot": with_vjp(ragged),
}


def main() -> None:
    machine = get_hardware("gb200")
    mesh = Mesh(np.asarray(compile_only_devices(machine, 1), dtype=object), "x")
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((ROWS, D), (D, E, F), (ROWS, F))]
    shapes.append(jax.ShapeDtypeStruct((E,), jnp.int32))
    ideal = 3 * 2 * BALANCED * D * F
    lines = [
        "# The experts' products, forward and backward, compiled for one GB200 (`benchmarks/deepseek/grouped.py`)", "",
        "| | temporaries GiB | FLOPs over those of the balanced rows | compile s |", "|---|---|---|---|",
    ]  # fmt: skip
    for name, way in WAYS.items():
        whole = PartitionSpec()
        local = jax.shard_map(
            way, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
        )  # Pallas asks for a device
        step = jax.jit(
            local, in_shardings=NamedSharding(mesh, whole), out_shardings=NamedSharding(mesh, whole),
            compiler_options=compiler_options("cuda", deviceless=True, offloads=False),
        )  # fmt: skip
        start = time.perf_counter()
        compiled = step.lower(*shapes).compile()
        seconds = time.perf_counter() - start
        module = parse_module(compiled.as_text() or "")
        flops = FlopCounter(module).computation(module.entry)
        memory: Any = compiled.memory_analysis()
        lines.append(f"| {name} | {memory.temp_size_in_bytes / 2**30:.2f} | {flops / ideal:.3f} | {seconds:.1f} |")
        print(lines[-1], flush=True)
    (Path(__file__).parent / "grouped.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
