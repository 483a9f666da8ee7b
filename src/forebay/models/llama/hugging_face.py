"""Llama weights as Hugging Face keeps them: `config.json` beside safetensors files, one or sharded with an index.

There, every layer has its own tensors and a matrix is `[out, in]` with heads and head size merged;
here, layers are stacked and `embed` comes first (`forebay.models.llama.model`). `_LAYOUT` holds the
correspondence, and both directions follow from it. The rotary halves lie the same way in both.

Nothing is held in host memory beyond one device's part of one stacked weight when loading, and one
file's worth of tensors when saving.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from forebay.models.llama import model
from forebay.models.llama.config import LlamaConfig, RopeScaling
from forebay.models.llama.model import Layer, Weights

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

# Stored types that are plain numbers; anything else is quantised and needs scales to be read.
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_SAVED_DTYPES = ("float32", "bfloat16", "float16")

# Rotary frequencies that early conversions stored although they follow from the configuration.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"


@dataclasses.dataclass(frozen=True)
class _Form:
    """How one of our weights is stored: under which name, and which of our dimensions make each stored one.

    `{}` in the name is the layer; dimensions are counted without the layer.
    """

    name: str
    dimensions: tuple[tuple[int, ...], ...]

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


_VECTOR = ((0,),)
_OUT_IN = ((1,), (0,))  # ours is [in, out]
_SAME = ((0,), (1,))
_HEADS_IN = ((1, 2), (0,))  # ours is [in, heads, head size]
_OUT_HEADS = ((0,), (1, 2))  # ours is [out, heads, head size]

_LAYOUT = Weights(
    embedding_VD=_Form("model.embed_tokens.weight", _SAME),
    layers=Layer(
        attention_norm_D=_Form("model.layers.{}.input_layernorm.weight", _VECTOR),
        query_DHK=_Form("model.layers.{}.self_attn.q_proj.weight", _HEADS_IN),
        key_DGK=_Form("model.layers.{}.self_attn.k_proj.weight", _HEADS_IN),
        value_DGK=_Form("model.layers.{}.self_attn.v_proj.weight", _HEADS_IN),
        out_DHK=_Form("model.layers.{}.self_attn.o_proj.weight", _OUT_HEADS),
        mlp_norm_D=_Form("model.layers.{}.post_attention_layernorm.weight", _VECTOR),
        gate_DF=_Form("model.layers.{}.mlp.gate_proj.weight", _OUT_IN),
        up_DF=_Form("model.layers.{}.mlp.up_proj.weight", _OUT_IN),
        down_DF=_Form("model.layers.{}.mlp.down_proj.weight", _SAME),
    ),
    final_norm_D=_Form("model.norm.weight", _VECTOR),
    head_DV=_Form("lm_head.weight", _OUT_IN),
)


def config_from_hf(directory: str | os.PathLike[str]) -> LlamaConfig:
    """The configuration in `directory/config.json`, as transformers 4 or 5 writes it.

    Keys that are absent have the defaults of transformers' `LlamaConfig`, except sizes, which must be there.

    Raises:
        UserError: no such file; not JSON; a key whose value this model cannot represent (another
            `model_type`, biases, another activation or RoPE scaling, quantisation); a missing or
            malformed size.
    """
    path = _existing(directory) / _CONFIG
    if not path.exists():
        raise UserError(f"there is no {_CONFIG} in {str(directory)!r}: give the directory of a Hugging Face model")
    return _Reader(path, _read_json(path)).config()


def load(
    directory: str | os.PathLike[str],
    config: LlamaConfig | None = None,
    *,
    dtype: Any = jnp.float32,
    shardings: Any = None,
) -> Weights[jax.Array]:
    """The weights in a Hugging Face directory: `model.safetensors`, or the files that its index names.

    Args:
        config: the model they are for, as `forebay.models.llama.PRESETS` has them; by default the one
            that `config.json` describes. Given, it must agree with `config.json` where there is one.
        dtype: of the result, whatever the files hold.
        shardings: a tree like the weights with a `jax.sharding.Sharding` for each, which may put them in
            any memory; each process reads only what its own devices hold. By default everything goes to
            JAX's default device.

    Returns:
        Arrays with the shapes of `model.shapes(config)`.

    Raises:
        UserError: a missing directory, configuration, index or file; a damaged file; tensors that are
            missing, superfluous, quantised or of another shape; a configuration that is not that of `config.json`.

    Example:
        `load("Llama-3.1-8B", PRESETS["llama3.1-8b"])`
    """
    path = _existing(directory)
    described = config_from_hf(path) if config is None or (path / _CONFIG).exists() else None
    config = config or described
    assert config is not None
    layout = _layout(config)
    with _open_tensors(path) as stored:
        _check_tensors(stored, layout, config, path)
        if described is not None:
            _check_same(config, described, path)
        if shardings is None:
            shardings = jax.tree.map(lambda _: None, layout)
        return jax.tree.map(
            lambda form, shape, sharding: _place(_Stack(stored, form, shape, jnp.dtype(dtype)), sharding),
            layout, model.shapes(config), shardings,
        )  # fmt: skip


def save(
    weights: Weights[jax.Array],
    config: LlamaConfig,
    directory: str | os.PathLike[str],
    *,
    dtype: Any = jnp.bfloat16,
    max_shard_bytes: float = 5e9,
    max_position_embeddings: int | None = None,
) -> None:
    """Writes weights and `config.json` so that transformers' `LlamaForCausalLM.from_pretrained` loads them.

    The directory appears complete or not at all. The token ids of begin and end of text are left open in
    `config.json`: they belong to the tokenizer.

    Args:
        weights: arrays with the shapes of `model.shapes(config)`, on devices of this process.
        directory: new or empty.
        dtype: of the files: float32, bfloat16 or float16.
        max_shard_bytes: the tensor bytes of one file; more than this is split into files with an index. A
            tensor larger than this has a file of its own.
        max_position_embeddings: the longest sequence in tokens to declare. By default what the RoPE scaling
            stretches to, or 8192, the length Llama 3 was first trained with.

    Raises:
        UserError: a directory that holds anything or cannot be written; weights that are not those of
            `config`; another dtype; a size of shards that is not positive.
    """
    if jnp.dtype(dtype).name not in _SAVED_DTYPES:
        raise unknown("dtype of saved weights", jnp.dtype(dtype).name, _SAVED_DTYPES)
    if not max_shard_bytes > 0:
        raise UserError(f"max_shard_bytes={max_shard_bytes} must be positive: give the bytes of one file, as in 5e9")
    _check_weights(weights, config)
    target = Path(directory).resolve()
    tensors = list(_stored_tensors(weights, config, jnp.dtype(dtype)))
    text = json.dumps(_config_to_hf(config, jnp.dtype(dtype), max_position_embeddings), indent=2) + "\n"
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserError(f"{str(directory)!r} already holds something: save to a new or an empty directory")
        target.parent.mkdir(parents=True, exist_ok=True)
        # beside the target, so that the rename at the end stays on one file system
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        partial.mkdir()
        try:
            (partial / _CONFIG).write_text(text)
            _write_tensors(partial, tensors, max_shard_bytes)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot save weights to {str(directory)!r} ({reason}): choose another directory") from None


def _layout(config: LlamaConfig) -> Weights[_Form]:
    return dataclasses.replace(_LAYOUT, head_DV=None) if config.tied_embeddings else _LAYOUT


def _existing(directory: str | os.PathLike[str]) -> Path:
    path = Path(directory)
    if not path.is_dir():
        raise UserError(f"there is no directory {str(path)!r}: give the directory of a Hugging Face model")
    return path


def _read_json(path: Path) -> dict[str, Any]:
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
class _Reader:
    """Reads one `config.json`; every error names the file, the key and the value."""

    path: Path
    keys: Mapping[str, Any]

    def config(self) -> LlamaConfig:
        self._only("model_type", "llama", required=True)
        self._only("attention_bias", False)
        self._only("mlp_bias", False)
        self._only("quantization_config", None)
        if self.keys.get("hidden_act", "silu") not in ("silu", "swish"):
            raise self._refused("hidden_act", self.keys["hidden_act"], "silu")
        embed, heads = self._size("hidden_size"), self._size("num_attention_heads")
        if self.keys.get("head_dim") is None and embed % heads:
            raise UserError(
                f"{self.path}: hidden_size={embed} is not a multiple of num_attention_heads={heads}: give head_dim"
            )
        rope_theta, rope_scaling = self._rope()
        return LlamaConfig(
            vocab=self._size("vocab_size"),
            embed=embed,
            layers=self._size("num_hidden_layers"),
            heads=heads,
            kv_heads=self._size("num_key_value_heads", heads),
            head_dim=self._size("head_dim", embed // heads),
            mlp=self._size("intermediate_size"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            norm_eps=self._number(self.keys, "rms_norm_eps", 1e-6),
            tied_embeddings=self._flag("tie_word_embeddings"),
        )

    def _rope(self) -> tuple[float, RopeScaling | None]:
        """Transformers 4 has `rope_theta` and `rope_scaling` side by side, transformers 5 both in `rope_parameters`."""
        rope: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = self.keys.get(key)
            if value is not None and not isinstance(value, dict):
                raise self._refused(key, value, "an object or null")
            rope |= value or {}
        theta = self._number({"rope_theta": self.keys.get("rope_theta")} | rope, "rope_theta", 10_000.0)
        partial = rope.get("partial_rotary_factor", self.keys.get("partial_rotary_factor"))
        if partial not in (None, 1):
            raise self._refused("partial_rotary_factor", partial, "1")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind != "llama3":
            raise self._refused("rope_type", kind, "'llama3' or 'default'")
        low, high = self._number(rope, "low_freq_factor"), self._number(rope, "high_freq_factor")
        if low >= high:  # frequencies are blended over the interval between the two
            raise self._refused("low_freq_factor", low, f"less than high_freq_factor={high}")
        return theta, RopeScaling(
            factor=self._number(rope, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=int(self._number(rope, "original_max_position_embeddings")),
        )

    def _only(self, key: str, supported: Any, required: bool = False) -> None:
        value = self.keys.get(key, None if required else supported)
        if value != supported:
            raise self._refused(key, value, repr(supported))

    def _size(self, key: str, default: int | None = None) -> int:
        value = self.keys.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.path} has no {key!r}: give the config.json of a complete Llama model")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._refused(key, value, "a positive whole number")
        return value

    def _number(self, keys: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = keys.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._refused(key, value, "a positive number")
        return float(value)

    def _flag(self, key: str) -> bool:
        value = self.keys.get(key, False)
        if not isinstance(value, bool):
            raise self._refused(key, value, "true or false")
        return value

    def _refused(self, key: str, value: Any, supported: str) -> UserError:
        return UserError(f"{self.path}: {key}={value!r} is not something this model has: it must be {supported}")


def _config_to_hf(config: LlamaConfig, dtype: np.dtype, max_position_embeddings: int | None) -> dict[str, Any]:
    """In the words of transformers 4, which version 5 understands too."""
    scaling = config.rope_scaling
    stretched = int(scaling.factor * scaling.original_max_position_embeddings) if scaling else 8192
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": "llama3"} | dataclasses.asdict(scaling) if scaling else None,
        "max_position_embeddings": max_position_embeddings or stretched,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype.name,
    }


def _check_same(config: LlamaConfig, described: LlamaConfig, path: Path) -> None:
    """Shapes do not tell RoPE, the norms' epsilon or how heads are divided: those differ silently."""
    for field in dataclasses.fields(config):
        ours, theirs = getattr(config, field.name), getattr(described, field.name)
        if ours != theirs:
            raise UserError(
                f"the weights in {str(path)!r} are for {field.name}={theirs} ({_CONFIG}) and the model has "
                f"{field.name}={ours}: give the model that size, or change {_CONFIG} if you mean to"
            )


# --- reading ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _open_tensors(path: Path) -> Iterator[dict[str, Any]]:
    """Every tensor's name and the open file that holds it."""
    with contextlib.ExitStack() as files:
        stored: dict[str, Any] = {}
        for file in _files(path):
            with _readable(file):
                handle = files.enter_context(safe_open(file, framework="numpy"))
            stored |= dict.fromkeys(handle.keys(), handle)
        yield stored


def _files(path: Path) -> list[Path]:
    if (path / _SINGLE).exists():
        return [path / _SINGLE]
    if not (path / _INDEX).exists():
        shards = [p.name for p in path.glob("*.safetensors")]
        if shards:
            raise UserError(f"{str(path)!r} has {_listed(shards)} but no {_INDEX}: download the index too")
        hint = "convert them with transformers' save_pretrained" if list(path.glob("*.bin")) else "download them"
        raise UserError(f"there is neither {_SINGLE} nor {_INDEX} in {str(path)!r}: {hint}")
    names = _read_json(path / _INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
        raise UserError(f"{path / _INDEX} has no 'weight_map' of tensors to files: download it again")
    files = [path / name for name in sorted(set(names.values()))]
    missing = [f.name for f in files if not f.exists()]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(files)} files that {_INDEX} names are not in {str(path)!r}: "
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


def _names(layout: Weights[_Form], config: LlamaConfig) -> dict[str, tuple[_Form, tuple[int, ...]]]:
    """Every stored tensor of the model: its form and, without the layer, our shape."""
    names: dict[str, tuple[_Form, tuple[int, ...]]] = {}
    shapes = model.shapes(config)
    for form, shape in _pairs(layout.layers, shapes.layers):
        names |= {form.name.format(layer): (form, shape[1:]) for layer in range(config.layers)}
    for form, shape in _pairs(dataclasses.replace(layout, layers=None), dataclasses.replace(shapes, layers=None)):
        names[form.name] = (form, shape)
    return names


def _pairs(forms: Any, values: Any) -> list[tuple[_Form, Any]]:
    """Each form of a tree with what stands in its place in another tree of the same structure."""
    leaves, structure = jax.tree.flatten(forms)
    return list(zip(leaves, structure.flatten_up_to(values), strict=True))


def _check_tensors(stored: Mapping[str, Any], layout: Weights[_Form], config: LlamaConfig, path: Path) -> None:
    expected = _names(layout, config)
    missing = expected.keys() - stored.keys()
    if missing:
        raise UserError(
            f"{len(missing)} of {len(expected)} tensors of the model are not in {str(path)!r}: {_listed(missing)}; "
            f"choose the model that the weights are for"
        )
    tied_head = config.tied_embeddings and _LAYOUT.head_DV is not None and _LAYOUT.head_DV.name
    unexpected = {n for n in stored.keys() - expected.keys() if n != tied_head and not n.endswith(_DERIVED_SUFFIX)}
    if unexpected:
        raise UserError(
            f"{str(path)!r} has {len(unexpected)} tensors that the model has not: {_listed(unexpected)}; "
            f"choose the model that the weights are for"
        )
    for name, (form, shape) in expected.items():
        found = stored[name].get_slice(name)
        if tuple(found.get_shape()) != form.stored_shape(shape):
            raise UserError(
                f"{name} in {str(path)!r} has shape {list(found.get_shape())} and the model needs "
                f"{list(form.stored_shape(shape))}: choose the model (or the vocabulary) that the weights are for"
            )
        if found.get_dtype() not in _FLOAT_TYPES:
            raise UserError(
                f"{name} in {str(path)!r} is stored as {found.get_dtype()}, a quantised type: "
                f"use a copy of the weights in {', '.join(_FLOAT_TYPES)}"
            )
    if tied_head and tied_head in stored:
        _check_tied(stored, tied_head, layout.embedding_VD.name, path)


def _check_tied(stored: Mapping[str, Any], head: str, embedding: str, path: Path) -> None:
    """Some writers store the tied head as well; it must then be what it is tied to."""
    if not np.array_equal(stored[head].get_tensor(head), stored[embedding].get_tensor(embedding)):
        raise UserError(
            f"{head} in {str(path)!r} is not equal to {embedding} although the embeddings are tied: "
            f"load it as a model with untied embeddings"
        )


@dataclasses.dataclass(frozen=True)
class _Stack:
    """One weight of ours, of `shape` with layers first where it has them, and where its parts are stored."""

    stored: Mapping[str, Any]
    form: _Form
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """The part `index`, read layer by layer."""
        if "{}" not in self.form.name:
            return np.ascontiguousarray(self._tensor(self.form.name, self.shape, index), self.dtype)
        layers = range(self.shape[0])[index[0]]
        inner = [len(range(n)[i]) for n, i in zip(self.shape[1:], index[1:], strict=True)]
        out = np.empty((len(layers), *inner), self.dtype)
        for part, layer in zip(out, layers, strict=True):
            part[...] = self._tensor(self.form.name.format(layer), self.shape[1:], index[1:])
        return out

    def _tensor(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
        return self.form.read(self.stored[name].get_slice(name), shape, index)


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


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor to be written: made when it is asked for."""

    form: _Form
    array: jax.Array
    layer: int | None
    dtype: np.dtype

    @property
    def name(self) -> str:
        return self.form.name if self.layer is None else self.form.name.format(self.layer)

    @property
    def num_bytes(self) -> int:
        shape = self.array.shape if self.layer is None else self.array.shape[1:]
        return math.prod(shape) * self.dtype.itemsize

    def value(self) -> np.ndarray:
        # the layer as an operand, so that one program slices all layers of a stack
        layer = self.array if self.layer is None else jax.lax.dynamic_index_in_dim(self.array, self.layer, 0, False)
        return self.form.to_stored(np.asarray(jax.device_get(layer)).astype(self.dtype))


def _check_weights(weights: Weights[jax.Array], config: LlamaConfig) -> None:
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    wanted = dict(jax.tree.leaves_with_path(model.shapes(config), is_leaf=is_shape))
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


def _stored_tensors(weights: Weights[jax.Array], config: LlamaConfig, dtype: np.dtype) -> Iterator[_Tensor]:
    """In the order of the forward pass: the files of a sharded model then hold neighbouring layers."""
    layout = _layout(config)
    yield _Tensor(layout.embedding_VD, weights.embedding_VD, None, dtype)
    for layer in range(config.layers):
        for form, array in _pairs(layout.layers, weights.layers):
            yield _Tensor(form, array, layer, dtype)
    yield _Tensor(layout.final_norm_D, weights.final_norm_D, None, dtype)
    if layout.head_DV is not None and weights.head_DV is not None:
        yield _Tensor(layout.head_DV, weights.head_DV, None, dtype)


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
        file = _SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # "pt" is the layout of matrices, which readers in transformers look for
        save_file({t.name: t.value() for t in shard}, directory / file, metadata={"format": "pt"})
        shutil.copymode(directory / _CONFIG, directory / file)  # safetensors makes it readable to the owner alone
        files |= {t.name: file for t in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(t.num_bytes for t in tensors)}, "weight_map": files}
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
