"""The `Plan`: what stays in HBM, what moves to the host, what is recomputed."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forebay.errors import UserError, did_you_mean, unknown
from forebay.planner.placement import Placement, check_cover

SCHEMA = "forebay.plan/1"


@dataclasses.dataclass(frozen=True)
class ModelId:
    """The model a plan was made for. The fingerprint covers its family and sizes."""

    name: str
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """Placements for every stack of layers, and what they were made for.

    Attributes:
        placements: where activations go, per stack and range of layers.
        optimizer_host_fraction, parameters_host_fraction: the share of the optimizer state and of the
            parameters that lives in host memory, 0 to 1.
        model: the model it was made for; None for a plan that is not tied to one.
        hardware, devices, mesh, batch, seq: the configuration it was made for; batch in sequences for
            all devices together, seq in tokens.
        predicted, compiled, alternatives: JSON-like, as in the plan file's format.
        verified: whether the plan was compiled and found to fit.
        reasons: for each tensor of each range, JSON-like: its bytes, where it went, what else would have cost.
        notes: what a reader of it should know.
    """

    placements: tuple[Placement, ...]
    optimizer_host_fraction: float = 0.0
    parameters_host_fraction: float = 0.0
    model: ModelId | None = None
    hardware: str | None = None
    devices: int | None = None
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    batch: int | None = None
    seq: int | None = None
    predicted: Mapping[str, Any] | None = None
    compiled: Mapping[str, Any] | None = None
    verified: bool = False
    alternatives: tuple[Mapping[str, Any], ...] = ()
    reasons: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self):
        for what in ("optimizer_host_fraction", "parameters_host_fraction"):
            if not 0.0 <= getattr(self, what) <= 1.0:
                raise UserError(f"plan: {what} is {getattr(self, what)} and must be between 0 and 1")

    def for_stack(self, stack: str) -> tuple[Placement, ...]:
        """The placements of one stack, in order of layers."""
        return tuple(sorted((p for p in self.placements if p.stack == stack), key=lambda p: p.layers))

    @property
    def offloads(self) -> bool:
        """Whether anything at all lives on the host."""
        return bool(self.optimizer_host_fraction or self.stores)

    @property
    def stores(self) -> bool:
        """Whether layers store anything to the host: activations, or the gradients of weights that live there."""
        return bool(self.parameters_host_fraction or any(p.names("host") for p in self.placements))

    def policy(self, stack: str | None = None) -> Any:
        """The `jax.checkpoint` policy of one stack; without its name, of the only one.

        Raises:
            UserError: no such stack, or one whose layers have several placements: `forebay.scan_layers`
                and `forebay.apply` can do that, one policy cannot.
        """
        from forebay.offload.policy import checkpoint_policy

        return checkpoint_policy(self._only_placement(stack))

    def apply(self, block: Any, stack: str | None = None) -> Any:
        """`block`, a function of one layer, under `jax.checkpoint` with the stack's policy, for the body of a
        `jax.lax.scan`. Where the block has no names it gets those of `forebay.auto_name`.

        Raises:
            UserError: as `policy`.
        """
        from forebay.graph.auto_name import auto_name
        from forebay.offload.policy import apply

        return apply(auto_name(block), self._only_placement(stack))

    def explain(self) -> str:
        """The plan in words: what goes where and why, one line per tensor."""
        from forebay.report.plan import explain

        return explain(self.to_json())

    def _only_placement(self, stack: str | None) -> Placement:
        names = list(dict.fromkeys(p.stack for p in self.placements))
        if stack is None:
            if len(names) != 1:
                raise UserError(f"the plan has the stacks {', '.join(names)}: say which one")
            stack = names[0]
        if stack not in names:
            raise unknown("layer stack", stack, names)
        placements = self.for_stack(stack)
        if len(placements) != 1:
            raise UserError(
                f"the plan gives the layers of {stack!r} {len(placements)} placements, and a checkpoint policy is one: use "
                f"forebay.scan_layers or forebay.apply, or plan with variants=1"
            )
        (placement,) = placements
        return placement

    def check(
        self, stacks: Mapping[str, int], carried: Mapping[str, Iterable[str]], model: ModelId | None = None
    ) -> "Plan":
        """The plan, if it is one for these stacks and names.

        Raises:
            UserError: made for another model; a layer without a placement; a tensor that its stack
                does not carry.
        """
        if self.model is not None and model is not None and self.model.fingerprint != model.fingerprint:
            raise UserError(
                f"the plan was made for {self.model.name} (fingerprint {self.model.fingerprint}) and this is "
                f"{model.name} ({model.fingerprint}): make a plan for this model"
            )
        check_cover(self.placements, stacks)
        for placement in self.placements:
            names = list(carried[placement.stack])
            for tensor in placement.tensors:
                if tensor != "*" and tensor not in names:
                    lacking = [s for s, n in carried.items() if tensor not in set(n)]
                    raise UserError(
                        f"unknown tensor {tensor!r}: no activation of {', '.join(map(repr, lacking))} carries that name: "
                        f"{did_you_mean(tensor, names)}"
                    )
        return self

    def to_json(self) -> dict[str, Any]:
        """The plan file's content (schema `forebay.plan/1`)."""
        return {
            "schema": SCHEMA,
            "model": None if self.model is None else dataclasses.asdict(self.model),
            "hardware": self.hardware,
            "devices": self.devices,
            "mesh": dict(self.mesh),
            "batch": self.batch,
            "seq": self.seq,
            "placements": [
                {"stack": p.stack, "layers": list(p.layers), "tensors": dict(p.tensors)} for p in self.placements
            ],
            "optimizer": {"host_fraction": self.optimizer_host_fraction},
            "parameters": {"host_fraction": self.parameters_host_fraction},
            "predicted": None if self.predicted is None else dict(self.predicted),
            "compiled": None if self.compiled is None else dict(self.compiled),
            "verified": self.verified,
            "alternatives": [dict(a) for a in self.alternatives],
            "reasons": [dict(r) for r in self.reasons],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Any, source: str = "the plan") -> "Plan":
        """The inverse of `to_json`.

        Raises:
            UserError: not a plan, another schema version, or a missing or malformed key; names `source`.
        """
        if not isinstance(data, dict) or not str(data.get("schema", "")).startswith("forebay.plan/"):
            raise UserError(f"{source} is not a plan file: it has no schema 'forebay.plan/...'")
        if data["schema"] != SCHEMA:
            raise UserError(
                f"{source} has schema {data['schema']} and this version reads {SCHEMA}: make the plan again"
            )
        _check_types(data, source)
        try:
            model = data.get("model")
            return cls(
                placements=tuple(
                    Placement(p["stack"], (int(p["layers"][0]), int(p["layers"][1])), p["tensors"])
                    for p in data["placements"]
                ),
                optimizer_host_fraction=float(data.get("optimizer", {}).get("host_fraction", 0.0)),
                parameters_host_fraction=float(data.get("parameters", {}).get("host_fraction", 0.0)),
                model=None if model is None else ModelId(model["name"], model["fingerprint"]),
                hardware=data.get("hardware"),
                devices=data.get("devices"),
                mesh=dict(data.get("mesh") or {}),
                batch=data.get("batch"),
                seq=data.get("seq"),
                predicted=data.get("predicted"),
                compiled=data.get("compiled"),
                verified=bool(data.get("verified", False)),
                alternatives=tuple(data.get("alternatives") or ()),
                reasons=tuple(data.get("reasons") or ()),
                notes=tuple(data.get("notes") or ()),
            )
        except UserError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{source} is damaged ({type(error).__name__}: {error}): make the plan again") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads a plan file.

        Raises:
            UserError: the file is missing, is not JSON, or is not a plan of this version.
        """
        try:
            data = json.loads(Path(path).read_text(), object_pairs_hook=_unique_keys)
        except OSError as error:
            raise UserError(f"cannot read the plan file {str(path)!r}: {error.strerror}") from None
        except _RepeatedKeyError as error:
            raise UserError(f"the plan file {str(path)!r} gives {error.args[0]!r} twice: keep one of them") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"the plan file {str(path)!r} is not JSON ({error}): make the plan again") from None
        return cls.from_json(data, f"the plan file {str(path)!r}")


_NUMBERS = ("device_bytes", "host_bytes", "step_time_s", "recompute_s")


def _check_types(data: Mapping[str, Any], source: str) -> None:
    """Raises `UserError` where a key of a plan file has a value of another kind than plans have."""

    def fail(key: str, value: Any, kind: str) -> UserError:
        return UserError(f"{source} is damaged: {key} is {str(value)[:40]!r} and must be {kind}: make the plan again")

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    for key in ("devices", "batch", "seq"):
        value = data.get(key)
        if value is not None and (not is_number(value) or value != int(value)):
            raise fail(key, value, "a whole number")
    for key in ("predicted", "compiled", "mesh", "optimizer", "parameters"):
        if not isinstance(data.get(key) or {}, dict):
            raise fail(key, data[key], "an object")
    for key in ("alternatives", "reasons", "notes", "placements"):
        items = data.get(key) or []
        kind = str if key == "notes" else dict
        if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
            raise fail(key, items, f"a list of {'texts' if kind is str else 'objects'}")
    if not isinstance(data.get("verified", False), bool):
        raise fail("verified", data["verified"], "true or false")
    for key in _NUMBERS:
        value = (data.get("predicted") or {}).get(key, 0)
        if not is_number(value):
            raise fail(f"predicted.{key}", value, "a number")
    for placement in data.get("placements") or []:
        layers = placement.get("layers")
        if not (isinstance(layers, list) and len(layers) == 2 and all(type(n) is int for n in layers)):
            raise fail("layers", layers, "two whole numbers, first and past_last")


class _RepeatedKeyError(Exception):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise _RepeatedKeyError(key)
    return dict(pairs)
