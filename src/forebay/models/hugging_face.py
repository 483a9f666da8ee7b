"""Weights as Hugging Face keeps them: `config.json` beside safetensors files, one or sharded with an index.

There, every layer (and every expert) has its own tensors and a matrix is `[out, in]` with heads and head
size merged; here, layers are stacked and `embed` comes first. A tree like the weights with a `Form` for
each says how the two correspond, and both directions follow from it.

Nothing is held in host memory beyond one device's part of one stacked weight when loading, and one
file's worth of tensors when saving.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding as JaxSharding
from jax.sharding import SingleDeviceSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from forebay.errors import UserError, unknown

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Stored types that are plain numbers; anything else is quantised and needs scales to be read.
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_FP8 = "F8_E4M3"
_SCALE = "_scale_inv"
_SAVED_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Form:
    """How one of our weights is stored: under which name, and which of our dimensions make each stored one.

    Attributes:
        name: `{layer}` in it is the layer and `{expert}` the expert, each with a tensor of its own.
        dimensions: counted without the layer and the expert.
        first_layer: the number of the stack's first layer.
        expert_dimension: ours that is the expert, counted without the layer.
    """

    name: str
    dimensions: tuple[tuple[int, ...], ...]
    first_layer: int = 0
    expert_dimension: int | None = None

    @property
    def layered(self) -> bool:
        return "{layer}" in self.name

    @property
    def order(self) -> tuple[int, ...]:
        """Our dimensions in stored order, before merging."""
        return tuple(d for group in self.dimensions for d in group)

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(math.prod(shape[d] for d in group) for group in self.dimensions)

    def to_stored(self, ours: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(ours.transpose(self.order).reshape(self.stored_shape(ours.shape)))

    def read(self, stored: Any, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        """The part `index` of our weight of `shape`, from `stored`, which may be a slice of a file.

        A merged dimension is cut by its leading part in the file and by the others in memory.
        """
        ranges = [range(n)[i] for n, i in zip(shape, index, strict=True)]
        cuts, split, rest = [], [], []
        for first, *inner in self.dimensions:
            unit = math.prod(shape[d] for d in inner)
            cuts.append(slice(ranges[first].start * unit, ranges[first].stop * unit))
            split += [len(ranges[first]), *(shape[d] for d in inner)]
            rest += [slice(None), *(index[d] for d in inner)]
        return stored[tuple(cuts)].reshape(split)[tuple(rest)].transpose(np.argsort(self.order))

    def tensors(self, shape: Sequence[int]) -> Iterator[tuple[int | None, int | None, str]]:
        """The stored tensors of our weight of `shape`: layer (within the stack), expert and name."""
        experts = range(shape[1 + self.expert_dimension]) if self.expert_dimension is not None else (None,)
        for layer in range(shape[0]) if self.layered else (None,):
            for expert in experts:
                number = None if layer is None else self.first_layer + layer
                yield layer, expert, self.name.format(layer=number, expert=expert)

    def one_tensor(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of our shape the part that one stored tensor is of."""
        shape = tuple(shape[1:] if self.layered else shape)
        return tuple(n for d, n in enumerate(shape) if d != self.expert_dimension)


VECTOR = ((0,),)
OUT_IN = ((1,), (0,))  # ours is [in, out]
SAME = ((0,), (1,))
HEADS_IN = ((1, 2), (0,))  # ours is [in, heads, head size]
OUT_HEADS = ((0,), (1, 2))  # ours is [out, heads, head size]


def existing(directory: str | os.PathLike[str]) -> Path:
    path = Path(directory)
    if not path.is_dir():
        raise UserError(f"there is no directory {str(path)!r}: give the directory of a Hugging Face model")
    return path


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read as JSON ({reason}): download it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not a JSON object: download it again")
    return value


def _listed(names: Iterable[str]) -> str:
    """`a, b, c and 9 more`."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# --- configuration ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ConfigReader:
    """Reads one `config.json`; every error names the file, the key and the value."""

    path: Path
    keys: Mapping[str, Any]

    @classmethod
    def of(cls, directory: str | os.PathLike[str]) -> "ConfigReader":
        path = existing(directory) / CONFIG
        if not path.exists():
            raise UserError(f"there is no {CONFIG} in {str(directory)!r}: give the directory of a Hugging Face model")
        return cls(path, read_json(path))

    def rope(self) -> dict[str, Any]:
        """Transformers 4 has `rope_theta` and `rope_scaling` side by side, transformers 5 both in `rope_parameters`;
        `rope_type` is always there."""
        rope: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = self.keys.get(key)
            if value is not None and not isinstance(value, dict):
                raise self.refused(key, value, "an object or null")
            rope |= value or {}
        rope = {"rope_theta": self.keys.get("rope_theta"), "rope_type": rope.get("type", "default")} | rope
        partial = rope.get("partial_rotary_factor", self.keys.get("partial_rotary_factor"))
        if partial not in (None, 1):
            raise self.refused("partial_rotary_factor", partial, "1")
        return rope

    def only(self, key: str, supported: Any, required: bool = False) -> None:
        value = self.keys.get(key, None if required else supported)
        if value != supported:
            raise self.refused(key, value, repr(supported))

    def silu_only(self) -> None:
        if self.keys.get("hidden_act", "silu") not in ("silu", "swish"):
            raise self.refused("hidden_act", self.keys["hidden_act"], "silu")

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.keys.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.path} has no {key!r}: give the config.json of a complete {self._family} model")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refused(key, value, "a positive whole number")
        return value

    def fp8_block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale in weights of `F8_E4M3`; None where nothing is quantised."""
        quantised = self.keys.get("quantization_config")
        if quantised is None:
            return None
        block = quantised.get("weight_block_size") if isinstance(quantised, dict) else None
        block = block if isinstance(block, list) and all(isinstance(b, int) and b > 0 for b in block) else []
        if len(block) != 2 or quantised.get("quant_method") != "fp8" or quantised.get("fmt", "e4m3") != "e4m3":
            supported = "fp8 in e4m3 with a weight_block_size of [rows, columns]"
            raise self.refused("quantization_config", quantised, supported)
        return block[0], block[1]

    def head_dim(self) -> int:
        """`head_dim`, or else `hidden_size` over the heads."""
        embed, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if self.keys.get("head_dim") is None and embed % heads:
            raise UserError(
                f"{self.path}: hidden_size={embed} is not a multiple of num_attention_heads={heads}: give head_dim"
            )
        return self.size("head_dim", embed // heads)

    def number(self, keys: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = keys.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refused(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.keys.get(key, default)
        if not isinstance(value, bool):
            raise self.refused(key, value, "true or false")
        return value

    def refused(self, key: str, value: Any, supported: str) -> UserError:
        return UserError(f"{self.path}: {key}={value!r} is not something this model has: it must be {supported}")

    @property
    def _family(self) -> str:
        names = {"deepseek_v3": "DeepSeek-V3", "mixtral": "Mixtral", "qwen3_moe": "Qwen3-MoE"}
        return names.get(str(self.keys.get("model_type")), "Llama")


def check_same(config: Any, described: Any, path: Path, but: Collection[str] = ()) -> None:
    """Shapes do not tell RoPE, the norms' epsilon or how heads are divided: those differ silently."""
    for field in dataclasses.fields(config):
        ours, theirs = getattr(config, field.name), getattr(described, field.name)
        if ours != theirs and field.name not in but:
            raise UserError(
                f"the weights in {str(path)!r} are for {field.name}={theirs} ({CONFIG}) and the model has "
                f"{field.name}={ours}: give the model that size, or change {CONFIG} if you mean to"
            )


# --- reading ----------------------------------------------------------------------------------------


def load(
    path: Path,
    layout: Any,
    shapes: Any,
    *,
    dtype: Any,
    shardings: Any,
    passed_over: Callable[[str], bool],
    check: Callable[[Mapping[str, "StoredTensor"]], None] = lambda stored: None,
    fp8_block: tuple[int, int] | None = None,
) -> Any:
    """A tree of weights from the files in a directory.

    Args:
        layout: a tree of `Form`s; shapes: a tree like it of our shapes.
        dtype: of the result, whatever the files hold.
        shardings: a tree like it of shardings, or None for JAX's default device.
        passed_over: whether a tensor that the model has not may be there.
        check: is called with all stored tensors, when their names and shapes are found right.
        fp8_block: rows and columns that share a scale in weights of `F8_E4M3`; None refuses such weights.

    Raises:
        UserError: a missing index or file; a damaged file; tensors that are missing, superfluous, of another shape, or
            quantised otherwise.
    """
    with _open_tensors(path) as stored:
        _check_tensors(stored, layout, shapes, path, passed_over, fp8_block)
        check(stored)
        if shardings is None:
            shardings = jax.tree.map(lambda _: None, layout)
        return jax.tree.map(
            lambda form, shape, sharding: _place(_Stack(stored, form, shape, jnp.dtype(dtype), fp8_block), sharding),
            layout, shapes, shardings,
        )  # fmt: skip


def stored_names(path: Path) -> frozenset[str]:
    """The names of all tensors in the files of a directory."""
    with _open_tensors(path) as stored:
        return frozenset(stored)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open file."""

    name: str
    handle: Any
    file: Path

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._slice.get_shape())

    @property
    def dtype(self) -> str:
        return self._slice.get_dtype()

    def __getitem__(self, cuts: Any) -> np.ndarray:
        return self._slice[cuts]

    @property
    def _slice(self) -> Any:
        return self.handle.get_slice(self.name)

    def fp8(self) -> np.ndarray:
        """All of a tensor of `F8_E4M3`, for which safetensors knows no NumPy type: its bytes, where the header says."""
        start, header = _header(self.file, self.file.stat().st_mtime_ns)
        raw = np.memmap(self.file, np.uint8, "r", offset=start + header[self.name]["data_offsets"][0], shape=self.shape)
        return raw.view(jnp.dtype(jnp.float8_e4m3fn))


@functools.cache
def _header(file: Path, modified_ns: int) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file starts, and its header; a file of 671B has some 600 tensors to look up."""
    del modified_ns  # another file of the same name is not the same
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return 8 + length, json.loads(opened.read(length))


@contextlib.contextmanager
def _open_tensors(path: Path) -> Iterator[dict[str, StoredTensor]]:
    """Every tensor by its name."""
    with contextlib.ExitStack() as files:
        stored: dict[str, StoredTensor] = {}
        for file in _files(path):
            with _readable(file):
                handle = files.enter_context(safe_open(file, framework="numpy"))
            stored |= {name: StoredTensor(name, handle, file) for name in handle.keys()}  # noqa: SIM118
        yield stored


def _files(path: Path) -> list[Path]:
    if (path / SINGLE).exists():
        return [path / SINGLE]
    if not (path / INDEX).exists():
        shards = [p.name for p in path.glob("*.safetensors")]
        if shards:
            raise UserError(f"{str(path)!r} has {_listed(shards)} but no {INDEX}: download the index too")
        hint = "convert them with transformers' save_pretrained" if list(path.glob("*.bin")) else "download them"
        raise UserError(f"there is neither {SINGLE} nor {INDEX} in {str(path)!r}: {hint}")
    names = read_json(path / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
        raise UserError(f"{path / INDEX} has no 'weight_map' of tensors to files: download it again")
    files = [path / name for name in sorted(set(names.values()))]
    missing = [f.name for f in files if not f.exists()]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(files)} files that {INDEX} names are not in {str(path)!r}: "
            f"{_listed(missing)}; download them"
        )
    return files


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{file} ({file.stat().st_size:,} bytes) is not a complete safetensors file ({reason}): download it again"
        ) from None


def pairs(forms: Any, values: Any) -> list[tuple[Form, Any]]:
    """Each form of a tree with what stands in its place in another tree of the same structure."""
    leaves, structure = jax.tree.flatten(forms)
    return list(zip(leaves, structure.flatten_up_to(values), strict=True))


def _check_tensors(
    stored: Mapping[str, StoredTensor],
    layout: Any,
    shapes: Any,
    path: Path,
    passed_over: Callable[[str], bool],
    fp8_block: tuple[int, int] | None,
) -> None:
    expected = {
        name: form.stored_shape(form.one_tensor(shape))
        for form, shape in pairs(layout, shapes)
        for _, _, name in form.tensors(shape)
    }
    missing = expected.keys() - stored.keys()
    if missing:
        raise UserError(
            f"{len(missing)} of {len(expected)} tensors of the model are not in {str(path)!r}: {_listed(missing)}; "
            f"choose the model that the weights are for"
        )
    scales = {n + _SCALE for n in expected if stored[n].dtype == _FP8} if fp8_block else set()
    unexpected = {n for n in stored.keys() - expected.keys() - scales if not passed_over(n)}
    if unexpected:
        raise UserError(
            f"{str(path)!r} has {len(unexpected)} tensors that the model has not: {_listed(unexpected)}; "
            f"choose the model that the weights are for"
        )
    for name, shape in expected.items():
        found = stored[name]
        if found.shape != shape:
            raise UserError(
                f"{name} in {str(path)!r} has shape {list(found.shape)} and the model needs "
                f"{list(shape)}: choose the model (or the vocabulary) that the weights are for"
            )
        if found.dtype == _FP8 and fp8_block is not None:
            _check_scale(stored, name, shape, path, fp8_block)
        elif found.dtype not in _FLOAT_TYPES:
            raise UserError(
                f"{name} in {str(path)!r} is stored as {found.dtype}, a quantised type: "
                f"use a copy of the weights in {', '.join(_FLOAT_TYPES)}"
            )


def _check_scale(
    stored: Mapping[str, StoredTensor], name: str, shape: tuple[int, ...], path: Path, block: tuple[int, int]
) -> None:
    wanted = tuple(-(-n // b) for n, b in zip(shape, block, strict=True)) if len(shape) == 2 else None
    scale = stored.get(name + _SCALE)
    if wanted is None or scale is None:
        raise UserError(
            f"{name} in {str(path)!r} is stored as {_FP8} without {name + _SCALE}: download the weights again"
        )
    if scale.shape != wanted:
        raise UserError(
            f"{scale.name} in {str(path)!r} has shape {list(scale.shape)} and {list(shape)} in blocks of {block[0]} x "
            f"{block[1]} needs {list(wanted)}: check weight_block_size in {CONFIG}, or download the weights again"
        )


@dataclasses.dataclass(frozen=True)
class _Stack:
    """One weight of ours, of `shape` with layers first where it has them, and where its parts are stored."""

    stored: Mapping[str, StoredTensor]
    form: Form
    shape: tuple[int, ...]
    dtype: np.dtype
    fp8_block: tuple[int, int] | None

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """The part `index`, read tensor by tensor."""
        form, shape = self.form, self.form.one_tensor(self.shape)
        ranges = [range(n)[i] for n, i in zip(self.shape, index, strict=True)]
        out = np.empty([len(r) for r in ranges], self.dtype)
        expert_at = None if form.expert_dimension is None else form.expert_dimension + form.layered
        inner = [i for d, i in enumerate(index) if d != expert_at and not (d == 0 and form.layered)]
        for layer, expert, name in form.tensors(self.shape):
            at: list[Any] = [slice(None)] * out.ndim
            for dimension, number in ((0, layer), (expert_at, expert)):
                if number is not None and dimension is not None:
                    if number not in ranges[dimension]:
                        break
                    at[dimension] = ranges[dimension].index(number)
            else:
                out[tuple(at)] = form.read(self._tensor(name), shape, inner)
        return out

    def _tensor(self, name: str) -> Any:
        tensor = self.stored[name]
        if tensor.dtype != _FP8 or self.fp8_block is None:
            return tensor
        return dequantised(tensor.fp8(), self.stored[name + _SCALE][...], self.fp8_block)


def dequantised(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """A float32 matrix from one in blocks that share a scale: `weight * scale` of its block (DeepSeek-V3's
    `weight_scale_inv`, which is multiplied by in spite of its name)."""
    rows, columns = (
        np.repeat(np.arange(n), b)[:size] for n, b, size in zip(scale.shape, block, weight.shape, strict=True)
    )
    return weight.astype(np.float32) * scale.astype(np.float32)[np.ix_(rows, columns)]


def _place(stack: _Stack, sharding: JaxSharding | None) -> jax.Array:
    """The weight on its devices: each distinct part is read once and let go before the next."""
    if sharding is None:
        return jax.device_put(stack.read((slice(None),) * len(stack.shape)))
    holders: dict[tuple[tuple[int, int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(stack.shape).items():
        assert index is not None
        key = tuple(i.indices(n) for i, n in zip(index, stack.shape, strict=True))
        holders.setdefault(key, []).append(device)
    shards = []
    for key, devices in holders.items():
        part = stack.read(tuple(slice(*k) for k in key))
        where = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        shards += jax.block_until_ready([jax.device_put(part, w) for w in where])
    return jax.make_array_from_single_device_arrays(stack.shape, sharding, shards)


# --- writing ----------------------------------------------------------------------------------------


def save(
    weights: Any,
    layout: Any,
    shapes: Any,
    config: Callable[[np.dtype], Mapping[str, Any]],
    directory: str | os.PathLike[str],
    *,
    dtype: Any,
    max_shard_bytes: float,
) -> None:
    """Writes weights and `config.json`. The directory appears complete or not at all.

    Args:
        weights: a tree of arrays on devices of this process; layout, shapes: trees like it.
        config: what to write into `config.json`, from the dtype.
        directory: new or empty.
        dtype: of the files: float32, bfloat16 or float16.
        max_shard_bytes: the tensor bytes of one file; more than this is split into files with an index. A
            tensor larger than this has a file of its own.

    Raises:
        UserError: a directory that holds anything or cannot be written; weights of other shapes; another dtype; a size of
            shards that is not positive.
    """
    if jnp.dtype(dtype).name not in _SAVED_DTYPES:
        raise unknown("dtype of saved weights", jnp.dtype(dtype).name, _SAVED_DTYPES)
    if not max_shard_bytes > 0:
        raise UserError(f"max_shard_bytes={max_shard_bytes} must be positive: give the bytes of one file, as in 5e9")
    _check_weights(weights, shapes)
    target = Path(directory).resolve()
    tensors = list(_stored_tensors(weights, layout, jnp.dtype(dtype)))
    text = json.dumps(config(jnp.dtype(dtype)), indent=2) + "\n"
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserError(f"{str(directory)!r} already holds something: save to a new or an empty directory")
        target.parent.mkdir(parents=True, exist_ok=True)
        # beside the target, so that the rename at the end stays on one file system
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        partial.mkdir()
        try:
            (partial / CONFIG).write_text(text)
            _write_tensors(partial, tensors, max_shard_bytes)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot save weights to {str(directory)!r} ({reason}): choose another directory") from None


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor to be written: made when it is asked for."""

    name: str
    form: Form
    array: jax.Array
    layer: int | None
    expert: int | None
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.form.one_tensor(self.array.shape)) * self.dtype.itemsize

    def value(self) -> np.ndarray:
        # the layer as an operand, so that one program slices all layers of a stack
        part = self.array if self.layer is None else jax.lax.dynamic_index_in_dim(self.array, self.layer, 0, False)
        if self.expert is not None:
            assert self.form.expert_dimension is not None
            part = jax.lax.dynamic_index_in_dim(part, self.expert, self.form.expert_dimension, False)
        return self.form.to_stored(np.asarray(jax.device_get(part)).astype(self.dtype))


def _check_weights(weights: Any, shapes: Any) -> None:
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    wanted = dict(jax.tree.leaves_with_path(shapes, is_leaf=is_shape))
    given = dict(jax.tree.leaves_with_path(weights))
    for path in wanted | given:
        expected, found = wanted.get(path), given.get(path)
        if expected is None or found is None or expected != found.shape:
            raise UserError(
                f"weight {jax.tree_util.keystr(path)} has shape {found.shape if found is not None else None} "
                f"and the configuration says {expected}: save weights with the configuration they were made for"
            )
        if not found.is_fully_addressable:
            raise UserError(
                f"weight {jax.tree_util.keystr(path)} is spread over several processes: "
                f"restore the checkpoint in one process and save from there"
            )


def _stored_tensors(weights: Any, layout: Any, dtype: np.dtype) -> list[_Tensor]:
    """In the order of the forward pass, in which the first weight is the embedding: the files of a sharded model then
    hold neighbouring layers."""
    found: list[tuple[tuple[int, ...], _Tensor]] = []
    for number, (form, array) in enumerate(pairs(layout, weights)):
        for layer, expert, name in form.tensors(array.shape):
            where = (1, form.first_layer + layer) if layer is not None else (0 if number == 0 else 2, 0)
            found.append(((*where, number, expert or 0), _Tensor(name, form, array, layer, expert, dtype)))
    return [tensor for _, tensor in sorted(found, key=lambda f: f[0])]


def _write_tensors(directory: Path, tensors: Sequence[_Tensor], max_shard_bytes: float) -> None:
    shards: list[list[_Tensor]] = []
    room = 0.0
    for tensor in tensors:
        if not shards or tensor.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # "pt" is the layout of matrices, which readers in transformers look for
        save_file({t.name: t.value() for t in shard}, directory / file, metadata={"format": "pt"})
        shutil.copymode(directory / CONFIG, directory / file)  # safetensors makes it readable to the owner alone
        files |= {t.name: file for t in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(t.num_bytes for t in tensors)}, "weight_map": files}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
