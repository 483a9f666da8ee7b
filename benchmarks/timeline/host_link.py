"""What libtpu's scheduler takes a copy from the host to last: the rate of a TPU's link in its own cost model.

    .venv/bin/python benchmarks/timeline/host_link.py

Compiled only, no TPU is needed. A chain of 400 products has time for a copy that is needed at its end. libtpu starts the
copy as many kernels before its end as it thinks the copy lasts; each kernel carries the cycles that it is estimated to
take. With twice the bytes come so many more cycles, and the quotient is the rate in bytes a cycle. A kernel's cycles and
its FLOPs at the chip's peak rate tell the clock, at least: products do not run faster than that.
"""

import os
import re
from itertools import pairwise

SIZES_MIB = (256, 512, 1024)
WIDTH, PRODUCTS = 4096, 400


def cycles(hardware: str, mib: int) -> tuple[int, int]:
    """The cycles of the kernels between the copy's start and its done, and of one product."""
    import jax
    import jax.numpy as jnp

    from forebay.hardware import get_hardware
    from forebay.xla.topology import compile_only_devices

    devices = compile_only_devices(get_hardware(hardware), 8)[:1]
    device, host = (
        jax.sharding.SingleDeviceSharding(devices[0], memory_kind=kind) for kind in ("device", "pinned_host")
    )

    def step(x: jax.Array, weight: jax.Array, hosted: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(PRODUCTS):
            x = jnp.tanh(x @ weight)
        return x, jax.device_put(hosted, device)[:WIDTH] @ x

    square = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    hosted = jax.ShapeDtypeStruct((mib * 2**20 // 2 // WIDTH, WIDTH), jnp.bfloat16)
    compiled = jax.jit(step, in_shardings=(device, device, host), out_shardings=device).lower(square, square, hosted)
    text = compiled.compile().as_text()
    assert text is not None
    entry = text[text.index("\nENTRY") :].splitlines()
    start = next(k for k, line in enumerate(entry) if "S(5)" in line and "-start(" in line)
    name = re.match(r"\s*%?([\w.\-]+) =", entry[start])
    assert name is not None
    done = next(k for k, line in enumerate(entry) if f"-done(%{name[1]})" in line or f"-done({name[1]})" in line)
    estimated = [int(c) for line in entry[start:done] for c in re.findall(r'"estimated_cycles":"(\d+)"', line)]
    return sum(estimated), max(estimated, default=0)


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    from forebay.hardware import get_hardware

    for hardware in ("v5p", "v6e"):
        found = [cycles(hardware, mib) for mib in SIZES_MIB]
        peak = get_hardware(hardware).flops_per_s["bf16"]
        least_hz = found[0][1] / (2 * WIDTH**3 / peak)
        for (small, large), (few, many) in zip(pairwise(SIZES_MIB), pairwise(c for c, _ in found), strict=True):
            rate = (large - small) * 2**20 / (many - few)
            print(
                f"{hardware}: from {small} to {large} MiB {many - few} cycles, {rate:.1f} bytes a cycle: "
                f"{rate * 1.75:.0f} GB/s at 1.75 GHz (products at the peak rate: {least_hz / 1e9:.2f} GHz)"
            )


if __name__ == "__main__":
    main()
