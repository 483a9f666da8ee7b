"""Kernels that were assembled before: who gets them, and what happens where XLA fails with them."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from forebay.hardware import get_hardware
from forebay.xla import compile as module
from forebay.xla.compile import compile_step
from forebay.xla.kernels import KERNEL_CACHE, kernel_cache
from forebay.xla.topology import compile_only_devices


def step_on(hardware: str | None, width: int = 256):
    device = jax.devices()[0] if hardware is None else compile_only_devices(get_hardware(hardware), 1)[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((width, width), jnp.float32)
    return jax.jit(lambda x: jnp.tanh(x @ x).sum(), in_shardings=sharding, out_shardings=sharding), x


def cache_of(hardware: str | None) -> dict[str, str]:
    step, x = step_on(hardware)
    with kernel_cache(step.lower(x)) as options:
        return options


def test_gpus_that_are_not_there_have_a_file_for_each_kind_and_others_none():
    gb200, h200 = cache_of("gb200"), cache_of("h200")
    assert set(gb200) == set(h200) == {KERNEL_CACHE} and gb200 != h200 and gb200 == cache_of("gb200")
    assert cache_of(None) == cache_of("v5p") == {}


def test_a_file_of_the_users_own_and_one_in_use_are_left_alone(monkeypatch):
    step, x = step_on("gb200")
    lowered = step.lower(x)
    with kernel_cache(lowered), kernel_cache(lowered) as second:
        assert second == {}
    monkeypatch.setenv("XLA_FLAGS", f"--{KERNEL_CACHE}=/tmp/mine")
    assert cache_of("gb200") == {}


def test_a_second_compile_takes_them_and_comes_to_the_same():
    step, x = step_on("gb200", 384)
    first = compile_step(step, (x,))
    file = Path(cache_of("gb200")[KERNEL_CACHE])
    known = file.read_bytes()
    again = compile_step(step_on("gb200", 384)[0], (x,))
    assert known and file.read_bytes() == known, "nothing new was assembled"
    assert (again.device, again.host, again.rows) == (first.device, first.host, first.rows)


class Failing:
    """A lowered step whose compile fails as long as it is given known kernels."""

    def __init__(self, message: str, dump: Path):
        self.message, self.dump, self.asked = message, dump, []

    def compile(self, compiler_options: dict[str, Any]) -> Any:
        self.asked.append(KERNEL_CACHE in compiler_options)
        (self.dump / f"module_{len(self.asked)}.txt").write_text("HloModule")
        if self.asked[-1]:
            raise jax.errors.JaxRuntimeError(self.message)
        return SimpleNamespace(as_text=lambda: "HloModule m")


@pytest.fixture
def known(monkeypatch, tmp_path) -> Path:
    file = tmp_path / "kernels"
    file.write_text("damaged")
    monkeypatch.setattr(module, "kernel_cache", lambda lowered: contextlib.nullcontext({KERNEL_CACHE: str(file)}))
    return file


def test_where_the_compiler_fails_with_them_it_is_asked_without_and_they_are_forgotten(known, tmp_path):
    dump = tmp_path / "dump"
    dump.mkdir()
    lowered = Failing("INTERNAL: no such kernel", dump)
    assert module._compiled_text(lowered, {}, dump) == "HloModule m"
    assert lowered.asked == [True, False] and not known.exists()
    assert [f.name for f in dump.iterdir()] == ["module_2.txt"], "what the first try wrote is gone"


def test_a_step_that_does_not_fit_is_not_compiled_again(known, tmp_path):
    lowered = Failing("RESOURCE_EXHAUSTED: 3 GiB", tmp_path)
    with pytest.raises(jax.errors.JaxRuntimeError):
        module._compiled_text(lowered, {}, tmp_path)
    assert lowered.asked == [True] and known.exists()
