"""Numbers compared on the device before a run trusts its compiler with offloading.

Released compilers have given silently wrong gradients where activations come back from the host. What a
compiled step looks like is checked at every compile (`xla.invariants`); what it computes only a device can
tell. So before the first step of a run that offloads, a small program with the same layers and the same
plan computes its loss and gradients twice, offloaded and not, and they are compared. A result is kept: the
next run of the like on the same machine and versions does not compute it again.
"""

import dataclasses
import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forebay import offload
from forebay.cache import cache_dir
from forebay.errors import WrongNumbersError
from forebay.hardware.present import machine_of
from forebay.planner.placement import Placement
from forebay.train.planning import run_options, silent
from forebay.train.program import Program, make_program
from forebay.xla.versions import versions

SCHEMA = "forebay.parity/1"

TOLERANCE = {"bfloat16": 2.0**-4, "float32": 2.0**-8}
"""How far a gradient may be off, |offloaded - not| / |not| in the 2-norm of a leaf, by compute dtype; see `docs/overlap.md`."""

_SHORT = 6
"""Layers of a range, at most, or one more where its number is odd: pipelined and double-buffered loops peel off
up to three iterations and treat even and odd numbers of the rest differently."""

_SEQUENCE = 512
_LIVELY = 4.0
"""What the matrices of the layers are multiplied by, so that a layer's input is far from that of the layer before:
otherwise one could be read for the other unnoticed."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The leaf of loss and gradients that is off most, and by what part of its norm."""

    leaf: str
    relative: float


@dataclasses.dataclass(frozen=True)
class Checked:
    """The outcome of a check: `known` is whether it was made before."""

    worst: Difference
    known: bool


def needs_check(program: Program) -> bool:
    """Whether a run of the program moves activations between memories."""
    moves = any(p.names("host") for p in program.plan.placements)
    return moves and program.sharding.mesh.devices.flat[0].platform != "cpu"


def check_numbers(program: Program, progress: Callable[[str], None] = silent) -> Checked:
    """Compares loss and gradients of a small instance of `program` on its devices, offloaded and not.

    Raises:
        WrongNumbersError: they differ; names the leaf and the difference.
    """
    small = miniature(program)
    machine = machine_of(small.sharding.mesh.devices.flat[0])
    options = run_options(small, machine)[0]
    subject = _subject(small, options)
    file = cache_dir() / "parity" / f"{_digest(subject)}.json"
    known = _from_first_process(_read(file, subject))
    if known is not None:
        return Checked(known, known=True)
    progress("comparing gradients on the device, offloaded and not, on a small instance of the model")
    found = differences(small, options)
    worst = max(found, key=lambda d: math.inf if math.isnan(d.relative) else d.relative)
    tolerance = TOLERANCE[program.config.dtype]
    if not worst.relative <= tolerance:
        device = small.sharding.mesh.devices.flat[0]
        raise WrongNumbersError(
            f"offloading gives wrong numbers on {device.device_kind} with jax {jax.__version__}: {worst.leaf} is off by "
            f"{100 * worst.relative:.3g} % of its norm and may be off by {100 * tolerance:.3g} % (a small instance of the "
            f"model, against the same without offloading): use another version of jax, or placement=minimal"
        )
    _write(file, subject, worst)
    return Checked(worst, known=False)


def miniature(program: Program) -> Program:
    """A small program of the same family, mesh, dtype and kernel, with the ranges and placements of `program`'s plan."""
    config, sharding = program.config, program.sharding
    placements, layers = [], {}
    for stack in program.model.stacks:
        first = 0
        for p in program.plan.for_stack(stack):
            past_last = first + _short(p.layers[1] - p.layers[0])
            placements.append(dataclasses.replace(p, layers=(first, past_last)))
            first = past_last
        layers[stack] = first
    accumulate, seq = min(config.accumulate, 2), config.seq
    while seq > _SEQUENCE and seq % 2 == 0:
        seq //= 2
    small = dataclasses.replace(
        config, sizes={**config.sizes, **program.model.small_sizes(layers, sharding)}, seq=seq, accumulate=accumulate,
        batch=accumulate * sharding.size("batch"), placement="", plan="auto",
    )  # fmt: skip
    made = make_program(small, list(sharding.mesh.devices.flat))
    return dataclasses.replace(made, plan=dataclasses.replace(made.plan, placements=tuple(placements)))


def differences(program: Program, options: Mapping[str, Any]) -> list[Difference]:
    """How far each leaf of loss and gradients under the program's plan is from the same with nothing on the host.

    `options` are the compiler's for the program itself. Each leaf's difference is a part of its 2-norm;
    infinite or not a number where either is.
    """
    kept = tuple(_on_device(p) for p in program.plan.placements)
    reference = dataclasses.replace(program, plan=dataclasses.replace(program.plan, placements=kept))
    weights_sharding, replicated = program.state_shardings.weights, program.sharding.named(())

    def lively(key: jax.Array) -> Any:
        weights = program.model.init(key, jnp.float32)
        return jax.tree.map(lambda w: _LIVELY * w if w.ndim > 2 else w, weights)

    weights = jax.jit(lively, out_shardings=weights_sharding)(jax.random.key(0))
    batch = {
        name: jax.make_array_from_callback(shape.shape, sharding, lambda index, a=tokens: a[index])
        for (name, shape), sharding, tokens in zip(
            program.abstract_batch.items(), program.batch_shardings.values(), _tokens(program), strict=True
        )
    }

    def run(program: Program, options: Mapping[str, Any]) -> Any:
        compute = jax.jit(
            program.aux_and_gradients, in_shardings=(weights_sharding, program.batch_shardings),
            out_shardings=(replicated, weights_sharding), compiler_options=dict(options) or None,
        )  # fmt: skip
        return compute(weights, batch)

    machine = machine_of(program.sharding.mesh.devices.flat[0])
    ours = run(program, options)
    expected = run(reference, run_options(reference, machine)[0])
    relative = jax.jit(lambda a, b: jax.tree.map(_relative, a, b), out_shardings=replicated)(ours, expected)
    return [Difference(_leaf_name(path), float(value)) for path, value in jax.tree.leaves_with_path(relative)]


def _relative(actual: jax.Array, expected: jax.Array) -> jax.Array:
    off, size = (jnp.linalg.norm(v.astype(jnp.float32).ravel()) for v in (actual - expected, expected))
    return jnp.where(off == 0, 0.0, off / size)  # a gradient that is 0 must be 0


def _on_device(placement: Placement) -> Placement:
    tensors = {name: "device" if where == "host" else where for name, where in placement.tensors.items()}
    return dataclasses.replace(placement, tensors=tensors)


def _tokens(program: Program) -> list[np.ndarray]:
    """Inputs and targets, int32 `[batch, seq]`, the same in every process."""
    shape = (program.config.batch, program.config.seq + 1)
    ids = np.random.default_rng(0).integers(0, program.model.vocab, shape, np.int32)
    return [ids[:, :-1], ids[:, 1:]]


def _short(layers: int) -> int:
    return layers if layers <= _SHORT else _SHORT + layers % 2


def _leaf_name(path: Any) -> str:
    first, *rest = path
    return f"the gradient of {jax.tree_util.keystr(tuple(rest)).lstrip('.')}" if first.idx else "the loss"


def _subject(program: Program, options: Mapping[str, Any]) -> dict[str, Any]:
    """All that the outcome may depend on, JSON-like."""
    device = program.sharding.mesh.devices.flat[0]
    installed = {name: v for name, v in versions().items() if name != "forebay"}
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "runtime": device.client.platform_version,
        "versions": installed,
        "scan": _scan_version(),
        "options": dict(options),
        "flags": {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
        "mesh": {axis: size for axis, size in program.sharding.mesh.shape.items() if size > 1},
        "model": dataclasses.asdict(program.model.config),
        "batch": program.config.batch,
        "seq": program.config.seq,
        "accumulate": program.config.accumulate,
        "dtype": program.config.dtype,
        "attention": program.kernel.compiled,
        "placements": program.plan.to_json()["placements"],
    }


def _scan_version() -> str:
    """A digest of the code that makes a program out of a plan."""
    files = sorted(Path(offload.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]


def _digest(subject: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:24]


def _read(file: Path, subject: Mapping[str, Any]) -> Difference | None:
    """The outcome that was kept, None where there is none that can be read and is of this subject."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["schema"] != SCHEMA or kept["subject"] != json.loads(json.dumps(subject)):
            return None
        return Difference(str(kept["worst"]["leaf"]), float(kept["worst"]["relative"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, subject: Mapping[str, Any], worst: Difference) -> None:
    if jax.process_index():
        return
    record = {"schema": SCHEMA, "subject": subject, "worst": dataclasses.asdict(worst)}
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        warnings.warn(
            f"the outcome of comparing gradients cannot be kept in {file.parent}: {error.strerror}; the next run compares "
            f"them again (set FOREBAY_CACHE_DIR)",
            stacklevel=2,
        )


def _from_first_process(known: Difference | None) -> Difference | None:
    """What the first process knows: all of them must compute, or none."""
    if jax.process_count() == 1:
        return known
    from jax.experimental import multihost_utils

    relative = multihost_utils.broadcast_one_to_all(np.float32(np.nan if known is None else known.relative))
    if np.isnan(relative):
        return None
    return Difference("the worst leaf" if known is None else known.leaf, float(relative))
