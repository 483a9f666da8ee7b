"""What the tests of the model families share: weights, batches, and files to change. `model` is a family's `model.py`."""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from forebay.errors import UserError
from forebay.sharding import single_device

# Programs that run once: LLVM's optimisations would take longer than they save.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def parts(model, config):
    """Of a family with experts."""
    return model.Parts(config, single_device(), "blockwise", "blockwise")


def random_weights(model, config):
    """Large enough for attention and routing to be far from uniform; with biases, which start at zero."""
    rng = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(0.2 * rng.normal(size=shape), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, model.shapes(config), is_leaf=lambda x: isinstance(x, tuple))


def batch(config, seed=0, sequences=2, length=12):
    tokens = np.random.default_rng(seed).integers(config.vocab, size=(sequences, length + 1)).astype(np.int32)
    return {"inputs": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}


def relative_error(actual, expected):
    return np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max()


def assert_bit_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype, path
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e), err_msg=jax.tree_util.keystr(path))


def assert_same_file(actual, expected):
    """The tensors of two directories with one file each."""
    ours, theirs = (load_file(directory / "model.safetensors") for directory in (actual, expected))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def edit_tensors(directory, change):
    """`change` edits a dictionary of the stored arrays."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory, **keys):
    """Sets keys of config.json; a value of `...` takes the key away."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def error_of(function, *args, **kwargs):
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


_READ = """
import sys, numpy, torch, transformers
name, directory, tokens, out = sys.argv[1:]
model, report = getattr(transformers, name).from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
assert not any(report.values()), report
with torch.no_grad():
    numpy.save(out, model.eval()(torch.from_numpy(numpy.load(tokens)).long()).logits.numpy())
"""


def logits_by_transformers(name, directory, tokens, tmp_path):
    """Of the class of transformers called `name`. PyTorch may live in an environment of its own: FOREBAY_TORCH_PYTHON
    names its interpreter. Skips the test where there is none."""
    python = os.environ.get("FOREBAY_TORCH_PYTHON")
    if python is None:
        if not all(importlib.util.find_spec(package) for package in ("torch", "transformers")):
            pytest.skip("torch and transformers are not installed here and FOREBAY_TORCH_PYTHON names no interpreter")
        python = sys.executable
    np.save(tmp_path / "tokens.npy", tokens)
    files = [str(file) for file in (directory, tmp_path / "tokens.npy", tmp_path / "theirs.npy")]
    subprocess.run([python, "-c", _READ, name, *files], check=True)
    return np.load(tmp_path / "theirs.npy")
