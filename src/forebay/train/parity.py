"""Numbers compared on the device before a run trusts its compiler with offloading.

Released compilers have given silently wrong gradients where activations come back from the host. What a
compiled step looks like is checked at every compile (`xla.invariants`); what it computes only a device can
tell. So before the first step of a run that offloads, a small program with the same layers and the same
plan takes two steps, offloaded and not, and all that they leave is compared: losses, moments (of which the first is the
gradients' sum), weights. A result is kept: the next run of the like on the same machine and versions does not
compute it again.
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
"""How far a leaf may be off, |offloaded - not| / |not| in its 2-norm, by compute dtype; see `docs/overlap.md`."""

_SHORT = 6
"""Layers of a range, at most, or one more where its number is odd: double-buffered loops and pipelined ones peel off
up to three iterations and treat even and odd numbers of the rest differently."""

_SEQUENCE = 512
_STEPS = 2
"""The second is the first that reads moments which another has written."""
_SLICE_BYTES = 2**16
"""Of the small instance's state: so that its arrays, too, come in and go out in several slices."""
_LIVELY = 4.0
"""What the matrices of the layers are multiplied by, so that a layer's input is far from that of the layer before:
otherwise one could be read for the other unnoticed."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A leaf of what a step leaves, and by what part of its norm it is off."""

    leaf: str
    relative: float


@dataclasses.dataclass(frozen=True)
class Checked:
    """The outcome of a check: `known` is whether it was made before."""

    worst: Difference
    known: bool


def needs_check(program: Program) -> bool:
    """Whether a run of the program moves anything between memories."""
    return program.offloads and program.sharding.mesh.devices.flat[0].platform != "cpu"


def check_numbers(program: Program, progress: Callable[[str], None] = silent) -> Checked:
    """Compares steps of a small instance of `program` on its devices, offloaded and not.

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
    progress("comparing steps on the device, offloaded and not, on a small instance of the model")
    found = differences(small, options)
    worst = max(found, key=lambda d: math.inf if math.isnan(d.relative) else d.relative)
    tolerance = TOLERANCE[small.config.dtype]
    if not worst.relative <= tolerance:
        device = small.sharding.mesh.devices.flat[0]
        raise WrongNumbersError(
            f"offloading gives wrong numbers on {device.device_kind} with jax {jax.__version__}: {worst.leaf} is off by "
            f"{100 * worst.relative:.3g} % of its norm and may be off by {100 * tolerance:.3g} % (a small instance of the "
            f"model, against the same without offloading): use another version of jax, or keep everything on "
            f"the device (placement=minimal)"
        )
    _write(file, subject, worst)
    return Checked(worst, known=False)


def miniature(program: Program) -> Program:
    """A small program of the same family, mesh, dtype and kernel, with the ranges and placements of `program`'s plan.

    Of what `program` has some of in host memory, optimizer state or weights, it has all there.
    """
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
    plan = dataclasses.replace(
        made.plan, placements=tuple(placements),
        optimizer_host_fraction=float(program.plan.optimizer_host_fraction > 0),
        parameters_host_fraction=float(program.plan.parameters_host_fraction > 0),
    )  # fmt: skip
    return dataclasses.replace(made, plan=plan, least_host_bytes=1, slice_bytes=_SLICE_BYTES)


def differences(program: Program, options: Mapping[str, Any]) -> list[Difference]:
    """How far each leaf of what steps leave under the program's plan is from the same with nothing on the host.

    `options` are the compiler's for the program itself. Each leaf's difference is a part of its 2-norm;
    infinite or not a number where either is.
    """
    reference = _all_on_device(program)
    replicated = program.sharding.named(())

    def lively(key: jax.Array) -> Any:
        weights = program.model.init(key, jnp.float32)
        return jax.tree.map(lambda w: _LIVELY * w if w.ndim > 2 else w, weights)

    weights = jax.jit(lively, out_shardings=reference.state_shardings.weights)(jax.random.key(0))

    def run(program: Program, options: Mapping[str, Any]) -> dict[str, Any]:
        step, state, told = program.jit_step(options), program.state_of(weights), []
        for n in range(_STEPS):
            state, metrics = step(state, _batch(program, n))
            told.append({"loss": metrics["loss"], "grad_norm": metrics["grad_norm"]})
        return {"told": told, "state": jax.device_put(state, reference.state_shardings)}

    machine = machine_of(program.sharding.mesh.devices.flat[0])
    ours = run(program, options)
    expected = run(reference, run_options(reference, machine)[0])
    relative = jax.jit(lambda a, b: jax.tree.map(_relative, a, b), out_shardings=replicated)(ours, expected)
    found = [(_leaf_name(path), float(value)) for path, value in jax.tree.leaves_with_path(relative)]
    # a square is twice as far off as its root
    return [Difference(leaf, value / 2 if ".nu." in leaf else value) for leaf, value in found]


def _all_on_device(program: Program) -> Program:
    placements = tuple(_on_device(p) for p in program.plan.placements)
    plan = dataclasses.replace(
        program.plan, placements=placements, optimizer_host_fraction=0.0, parameters_host_fraction=0.0
    )
    master = program.config.master_weights and "device"
    config = dataclasses.replace(program.config, accumulate_on="device", master_weights=master)
    return dataclasses.replace(program, config=config, plan=plan)


def _relative(actual: jax.Array, expected: jax.Array) -> jax.Array:
    off, size = (jnp.linalg.norm(v.astype(jnp.float32).ravel()) for v in (actual - expected, expected))
    return jnp.where(off == 0, 0.0, off / size)  # a gradient that is 0 must be 0


def _on_device(placement: Placement) -> Placement:
    tensors = {name: "device" if where == "host" else where for name, where in placement.tensors.items()}
    return dataclasses.replace(placement, tensors=tensors)


def _batch(program: Program, number: int) -> dict[str, jax.Array]:
    """The batch of a step: random tokens, the same in every process."""
    shape = (program.config.batch, program.config.seq + 1)
    ids = np.random.default_rng(number).integers(0, program.model.vocab, shape, np.int32)
    tokens = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    return {
        name: jax.make_array_from_callback(tokens[name].shape, sharding, lambda index, a=tokens[name]: a[index])
        for name, sharding in program.batch_shardings.items()
    }


def _short(layers: int) -> int:
    return layers if layers <= _SHORT else _SHORT + layers % 2


def _leaf_name(path: Any) -> str:
    """`the loss of step 1`, or a place in the training state: `weights.layers.gate_DF`, `optimizer.mu.layers.gate_DF`."""
    kind, *rest = path
    if kind.key == "told":
        return f"the {'loss' if rest[1].key == 'loss' else 'gradient norm'} of step {rest[0].idx + 1}"
    names = [getattr(k, "name", getattr(k, "key", None)) for k in rest]
    return ".".join(str(n) for n in names if n is not None)  # without places in optax's chain


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
        "attention": program.kernel.name,
        "placements": program.plan.to_json()["placements"],
        "on_host": {
            "optimizer": program.plan.optimizer_host_fraction,
            "parameters": program.plan.parameters_host_fraction,
            "master_weights": program.config.master_weights,
            "sums": program.config.accumulate_on,
        },
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
