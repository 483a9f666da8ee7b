"""Checkpoints of a run: the training state, the position in the data, and what they belong to."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from forebay.errors import UserError, missing_extra
from forebay.train.program import Program
from forebay.train.state import TrainState


class Checkpoints:
    """The checkpoints in one directory, by Orbax: written in the background, sharded, the newest `keep` kept.

    Raises:
        MissingExtraError: Orbax is not installed.
    """

    def __init__(self, directory: Path, keep: int):
        try:
            import orbax.checkpoint as ocp
        except ModuleNotFoundError:
            raise missing_extra("orbax-checkpoint", "train", "keeping checkpoints") from None
        self._ocp = ocp
        self._directory = directory.absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    @property
    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, data: dict[str, Any], program: Program) -> None:
        """Starts writing a checkpoint; a step that is already there is left alone."""
        if step == self.latest_step:
            return
        program_json = {
            "model": program.model.name,
            "shapes": _shapes(program.abstract_state),
            "checksums": _checksums(state),
        }
        args = self._ocp.args.Composite(
            state=self._ocp.args.StandardSave(state),
            data=self._ocp.args.JsonSave(data),
            program=self._ocp.args.JsonSave(program_json),
        )
        self._manager.save(step, args=args)

    def restore(self, program: Program) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint, in the program's shardings, and the position in the data.

        Raises:
            UserError: there is none; it is damaged; its arrays have other shapes than the program's.
        """
        step = self.latest_step
        if step is None:
            raise UserError(
                f"there is no checkpoint in {self._directory} to resume from: start the run without --resume"
            )
        where = self._directory / str(step)
        args = self._ocp.args
        try:
            saved = self._manager.restore(step, args=args.Composite(program=args.JsonRestore()))["program"]
            saved = {key: saved[key] for key in ("model", "shapes", "checksums")}
        except Exception as error:
            raise _damaged(where, error) from None
        _check_shapes(saved, program, where)
        abstract = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            program.abstract_state, program.state_shardings,
        )  # fmt: skip
        wanted = args.Composite(state=args.StandardRestore(abstract), data=args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=wanted)
        except Exception as error:
            raise _damaged(where, error) from None
        for name, found in _checksums(restored["state"]).items():
            if found != saved["checksums"].get(name):
                raise _damaged(where, ValueError(f"{name} is not what was written"))
        return restored["state"], restored["data"]

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def _damaged(where: Path, error: Exception) -> UserError:
    first_sentence = str(error).strip().partition("\n")[0].partition(". ")[0]
    reason = first_sentence[:200] or type(error).__name__
    return UserError(f"the checkpoint {where} cannot be read ({reason}): remove it to resume from an older one")


def _shapes(state: TrainState) -> dict[str, list[int]]:
    return {jax.tree_util.keystr(path): list(x.shape) for path, x in jax.tree.leaves_with_path(state)}


def _checksums(state: TrainState) -> dict[str, int]:
    """For each array the sum of its elements' bits modulo 2^32: a storage's flipped bit would else pass for a weight."""
    # one after another: all of what lives in host memory may be too much for the device at once
    return {jax.tree_util.keystr(path): int(_bit_sum(x)) for path, x in jax.tree.leaves_with_path(state)}


@jax.jit
def _bit_sum(x: jax.Array) -> jax.Array:
    x = jax.device_put(x, jax.memory.Space.Device)
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jnp.sum(bits, dtype=jnp.uint32)


def _check_shapes(saved: dict[str, Any], program: Program, where: Path) -> None:
    ours, theirs = _shapes(program.abstract_state), saved["shapes"]
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise UserError(
                f"the checkpoint {where} is of another model ({saved['model']}): {name} is "
                f"{theirs.get(name, 'not there')} in it and {ours.get(name, 'not there')} in {program.model.name}: "
                f"resume with the configuration that made it"
            )


def truncate_metrics(file: Path, step: int) -> None:
    """Drops the lines of steps after `step`: a resumed run does them again, and each step stands once."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            break  # a line cut off by the end of the earlier run
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(f"{line}\n" for line in kept))
    temporary.replace(file)
