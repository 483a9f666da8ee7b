"""The ways in which a user may have compiled a GPU step: XLA's own scan and flags, or forebay's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
FLAGS: dict[str, dict[str, Any]] = {
    "off": {LATENCY_HIDING: False},
    "stock": {},
    "maxtext": {LATENCY_HIDING: True, "xla_gpu_enable_pipelined_host_offloading": True},
}
"""Ways with `jax.lax.scan` over `jax.checkpoint`, and the flags that each sets. In any other way, forebay compiles."""


def compiled(way: str, make: Callable[[], Any], machine: Any, hlo: Path) -> tuple[Any, Any, list[str]]:
    """(program, its compiled step, notes) of a program that `make` makes, compiled in a way; its HLO goes to `hlo`."""
    import jax

    from forebay.offload.policy import apply
    from forebay.train import program as programs
    from forebay.train.planning import compile_program
    from forebay.xla.compile import compile_step
    from forebay.xla.options import compiler_options

    def stock_scan(block: Any, plan: Any, x: Any, layers: Any, *constants: Any, stack: str) -> Any:
        checkpointed = apply(block, plan.for_stack(stack)[0])
        return jax.lax.scan(lambda x, layer: (checkpointed(layer, x, *constants), None), x, layers)[0]

    if way not in FLAGS:
        program = make()
        made = compile_program(program, machine, deviceless=True, save_hlo=hlo)
        return program, made.compiled, list(made.notes)
    programs.scan_layers = stock_scan  # type: ignore[assignment]
    program = make()
    # what a compile without a device needs in any case
    needed = compiler_options("cuda", deviceless=True, offloads=False)
    needed.pop(LATENCY_HIDING)
    step, args = program.jit_step(), (program.abstract_state, program.abstract_batch)
    return program, compile_step(step, args, options=needed | FLAGS[way], save_hlo=hlo), []
