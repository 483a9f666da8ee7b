"""Compiling a step with the real XLA compiler, and what the result says of its memory.

Sizes come from the compiler's buffer assignment. `memory_analysis()` agrees with it on GPU; on TPU its
temporaries are too large wherever there is a loop (a program it puts at 133 GiB compiles for a v5p of
95 GiB, and one is refused exactly when the assignment exceeds the memory), so it is not used.
"""

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from forebay.errors import CompilerFailedError, UserError
from forebay.xla.buffers import Assignment, read_assignment
from forebay.xla.copies import buffer_scopes, host_copy_bytes
from forebay.xla.exposure import exposed_bytes
from forebay.xla.fused_attention import missing_workspaces
from forebay.xla.hlo import HOST_MEMORY_SPACE, Module, parse_module
from forebay.xla.host_arguments import mark_host
from forebay.xla.invariants import all_violations, host_buffers
from forebay.xla.kernels import KERNEL_CACHE, kernel_cache
from forebay.xla.memory import Row, memory_rows
from forebay.xla.options import variants
from forebay.xla.remat import RematClones, remat_clones
from forebay.xla.topology import absent_gpu, compute_capability
from forebay.xla.versions import versions
from forebay.xla.windows import Transfer, transfers

SCHEMA = "forebay.compile/1"
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Sizes on one device, in bytes: a step's arguments, temporaries, and outputs, and what of these is one memory."""

    arguments: int
    temporaries: int
    output: int
    aliased: int

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries + self.output - self.aliased


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What the compiler made of a step. Bytes are per device."""

    device: Bytes
    host: Bytes
    rows: tuple[Row, ...]
    transfers: tuple[Transfer, ...]
    violations: tuple[str, ...]
    """What is wrong with the copies between device and host, if anything; see `xla.invariants`."""
    host_copy_bytes: int
    """Bytes that a step copies from host memory to host memory, to no use of ours."""
    remat: RematClones
    compile_time_s: float
    lower_time_s: float
    refused: str | None
    """The compiler's message where it refused the program for lack of memory; sizes are still those it found."""
    versions: Mapping[str, str]
    module: Module = dataclasses.field(repr=False)
    """The optimised, scheduled program."""
    assignment: Assignment = dataclasses.field(repr=False)
    """Where its values are in memory, and when."""
    scratch: Mapping[str, int] = dataclasses.field(default_factory=dict, repr=False)
    """What fused attention's kernels take on a GPU and a compile without one does not see, by instruction."""

    @property
    def added_bytes(self) -> int:
        """Of `device.temporaries`, what is not the compiler's: the largest of `scratch`."""
        return max(self.scratch.values(), default=0)

    def peak_rows(self, memory: str) -> tuple[Row, ...]:
        """The rows of `device` or `host` memory; those of the device add up to `device.total`."""
        return tuple(r for r in self.rows if r.memory == memory)


def compile_step(
    step: Any,
    args: tuple[Any, ...],
    *,
    weight_shapes: Collection[tuple[int, ...]] = (),
    hosted: tuple[Sequence[bool], Sequence[bool]] = ((), ()),
    options: Mapping[str, Any] | None = None,
    save_hlo: Path | None = None,
    dump: Path | None = None,
) -> CompiledStep:
    """Compiles a jitted function for the devices of its shardings and reads the result.

    Args:
        step: the result of `jax.jit`, with shardings over present or compile-only devices.
        args: abstract arguments.
        weight_shapes: shapes of the weights on one device, by which their gradients are recognised.
        hosted: for each argument and each of the first results whether it is in host memory, where jax may not know.
        options: compiler options for this compile, flag names without the leading dashes.
        save_hlo: where to write the optimised, scheduled HLO text.
        dump: an empty directory for all that XLA writes about the compile; it is not kept otherwise.

    Raises:
        CompilerFailedError: the compiler fails on the program for another reason than memory.
        UserError: the compiler refuses an option, or does not say what its memory holds.
    """
    start = time.perf_counter()
    lowered = step.lower(*args)
    mark_host(lowered, *hosted)
    lowered_at = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if dump is None:
            dump = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-xla-")))
        wanted = dict(options or {}) | {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
        refused = text = None
        try:
            text = _compiled_text(lowered, wanted, dump)
        except Exception as error:  # jax raises its own runtime error, whose class moves between versions
            refused = _refusal(error)
        compiled_at = time.perf_counter()
        if text is None:
            text = _dumped_hlo(dump)
        module = parse_module(text)
        assignment = read_assignment(dump, module)
    moved, scopes = tuple(transfers(module)), buffer_scopes(module)
    if save_hlo is not None:
        save_hlo.write_text(text)
    gpu = absent_gpu(lowered)
    scratch = missing_workspaces(module, compute_capability(gpu)) if gpu is not None else {}
    added = max(scratch.values(), default=0)
    device = _bytes(assignment, module, 0)
    return CompiledStep(
        device=dataclasses.replace(device, temporaries=device.temporaries + added),
        host=_bytes(assignment, module, HOST_MEMORY_SPACE),
        rows=tuple(memory_rows(assignment, module, weight_shapes, scopes, added)),
        transfers=moved,
        violations=tuple(all_violations(module, moved, host_buffers(assignment, scopes))),
        host_copy_bytes=host_copy_bytes(module),
        remat=remat_clones(module),
        compile_time_s=compiled_at - lowered_at,
        lower_time_s=lowered_at - start,
        refused=refused,
        versions=versions(),
        module=module,
        assignment=assignment,
        scratch=scratch,
    )


def compile_hidden(
    step: Any,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    judged: bool = True,
    save_hlo: Path | None = None,
    **arguments: Any,
) -> tuple[CompiledStep, Mapping[str, Any]]:
    """Compiles under the first variant of `options` that hides all copies in loops, or the one that hides most.

    A variant under which the copies cannot be right is taken only if they cannot under any.

    Args:
        judged: whether windows decide; otherwise the first variant that can be right is taken.
        arguments: those of `compile_step`.

    Returns:
        The step and the options that it was compiled with.
    """
    tried: list[tuple[bool, float, int, CompiledStep, Mapping[str, Any]]] = []
    for number, variant in enumerate(variants(options)):
        saved = None if save_hlo is None else save_hlo.with_name(f"{save_hlo.name}.{number}")
        compiled = compile_step(step, args, options=variant, save_hlo=saved, **arguments)
        bytes_exposed = exposed_bytes(compiled.transfers)
        wrong = bool(compiled.violations)
        tried.append((wrong, bytes_exposed if judged else 0, number, compiled, variant))
        if not (wrong or (judged and bytes_exposed)):
            break
    _, _, best, compiled, variant = min(tried, key=lambda t: t[:2])
    if save_hlo is not None:
        for number in range(len(tried)):
            file = save_hlo.with_name(f"{save_hlo.name}.{number}")
            file.replace(save_hlo) if number == best else file.unlink()
    return compiled, variant


def _compiled_text(lowered: Any, options: Mapping[str, Any], dump: Path) -> str:
    """The optimised program. Where the compiler fails with the kernels that are known, it is asked again without."""
    with kernel_cache(lowered) as known:
        try:
            return lowered.compile(compiler_options={**options, **known}).as_text()
        except Exception as error:
            if not known or _OUT_OF_MEMORY in str(error):
                raise
            Path(known[KERNEL_CACHE]).unlink(missing_ok=True)
            for file in dump.iterdir():  # of the first try
                file.unlink()
    return lowered.compile(compiler_options=dict(options)).as_text()


def _refusal(error: Exception) -> str:
    """The one line of an out-of-memory error; other errors of the compiler are raised in one line, the rest again."""
    message = str(error)
    if _OUT_OF_MEMORY in message:
        return next(line for line in message.splitlines() if line.strip()).strip()
    if "No such compile option" in message or "compiler option" in message.lower():
        raise UserError(f"this build of XLA refuses a compiler option: {message.splitlines()[0]}") from None
    if isinstance(error, jax.errors.JaxRuntimeError):
        raise CompilerFailedError(
            f"XLA fails on this program, which is a fault of the compiler's: {message.splitlines()[0]}: try another "
            f"placement or another version of jax"
        ) from error
    raise error


def _dumped_hlo(dump: Path) -> str:
    found = sorted(dump.glob("*after_optimizations*.txt"), key=lambda p: p.stat().st_size)
    found = [p for p in found if p.read_text(errors="replace").startswith("HloModule")]
    if not found:
        raise UserError(
            "the compiler refused the program for lack of memory before it said how much it needs: make it smaller"
        )
    return found[-1].read_text()


def _bytes(assignment: Assignment, module: Module, memory_space: int) -> Bytes:
    here = [a for a in assignment.allocations if a.memory_space == memory_space]
    arguments = sum(a.num_bytes for a in here if a.kind == "parameter")
    aliased = sum(a.num_bytes for a in here if a.kind == "parameter" and a.live_out)
    outputs = sum(a.num_bytes for a in here if a.kind == "output")
    temporaries = sum(a.num_bytes for a in here if a.kind == "temporary")
    return Bytes(arguments, temporaries, outputs + aliased, aliased)
