"""Devices that are not there: their numbers, their shapes, and that the compilers take them."""

import importlib.util
import os
import subprocess
import sys

import pytest

from forebay.errors import MissingExtraError, UserError
from forebay.hardware import Hardware, get_hardware, list_hardware
from forebay.xla import topology
from forebay.xla.topology import compile_only_devices, gpu_topology, target_config, tpu_shape

GPUS = ["a100", "h100", "h200", "gh200", "b200", "gb200", "gb300"]
TPUS = ["v5e", "v6e", "v5p", "tpu7x"]

has_cuda = importlib.util.find_spec("jax_plugins") is not None and importlib.util.find_spec("jax_plugins.xla_cuda13")
needs_cuda = pytest.mark.skipif(not has_cuda, reason="the CUDA plugin is not installed (extra aot)")
needs_tpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra aot)")


@pytest.fixture(autouse=True)
def no_user_files(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("FOREBAY_HARDWARE", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("h200", 1, "1x1x1"), ("h200", 2, "1x1x2"), ("h200", 8, "1x1x8"), ("h200", 16, "1x2x8"),
        ("gb200", 4, "1x1x4"), ("gb200", 8, "1x2x4"), ("gb200", 72, "1x18x4"), ("gb200", 128, "1x32x4"),
    ],
)  # fmt: skip
def test_gpus_fill_hosts(name: str, count: int, expected: str):
    assert gpu_topology(get_hardware(name), count) == expected


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("v5e", 1, (1, 1)), ("v5e", 8, (2, 4)), ("v6e", 128, (8, 16)), ("v6e", 256, (16, 16)),
        ("v5p", 1, (1, 1, 1)), ("v5p", 4, (2, 2, 1)), ("v5p", 8, (2, 2, 2)), ("v5p", 32, (2, 4, 4)),
        ("v5p", 64, (4, 4, 4)), ("v5p", 128, (4, 4, 8)), ("v5p", 256, (4, 8, 8)), ("v5p", 512, (8, 8, 8)),
        ("v5p", 6144, (16, 16, 24)), ("v5p", 8960, (16, 20, 28)),
        ("tpu7x", 2, (1, 1, 1)), ("tpu7x", 8, (2, 2, 1)), ("tpu7x", 128, (4, 4, 4)), ("tpu7x", 256, (4, 4, 8)),
    ],
)  # fmt: skip
def test_tpu_slices_are_those_that_can_be_had(name: str, count: int, expected: tuple[int, ...]):
    """The shapes are the published ones of Google's pages (v5e, v5p); a TPU7x chip is two devices."""
    assert tpu_shape(get_hardware(name), count) == expected


@pytest.mark.parametrize(
    ("name", "count", "nearest"),
    [
        ("h200", 12, "take 8 or 16"), ("gb200", 130, "take 128 or 132"), ("h200", 9, "take 8 or 16"),
        ("h200", 0, "take 1 or 8"), ("h200", -8, "take 1 or 8"),
        ("v5p", 48, "take 32 or 64"), ("v5p", 100_000, "take 8960"), ("v5p", 0, "take 1"),
        ("v5e", 512, "take 256"), ("v6e", 3, "take 2 or 4"),
        ("tpu7x", 1, "take 2"), ("tpu7x", 3, "take 2 or 4"),
    ],
)  # fmt: skip
def test_impossible_numbers_name_the_nearest(name: str, count: int, nearest: str):
    with pytest.raises(UserError, match=f"{name} does not come in {count} devices.*{nearest}$") as caught:
        compile_only_devices(get_hardware(name), count)
    assert "\n" not in str(caught.value)


def test_target_config_carries_the_machine():
    text = target_config(get_hardware("gb300"))
    for line in (
        "core_count: 152",
        "device_memory_size: 297021079552",
        "memory_bandwidth: 7928064000000",
        "cuda_compute_capability { major: 10 minor: 3 feature_extension: ACCELERATED_FEATURES }",
        'platform_version: "Compute Capability 10.3a"',
        'device_description_str: "NVIDIA GB300"',
    ):
        assert line in text
    assert "feature_extension: NONE" in target_config(get_hardware("a100"))
    assert text.count("{") == text.count("}")


def sharded_argument_bytes(machine: Hardware, count: int) -> tuple[int, str]:
    """Compiles x @ w, both sharded by their first axis: argument bytes per device, and the HLO."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = compile_only_devices(machine, count)
    assert len(devices) == count
    rows = NamedSharding(Mesh(np.array(devices), ("x",)), P("x", None))
    step = jax.jit(lambda x, w: jnp.sum(jnp.tanh(x @ w)), in_shardings=(rows, rows))
    x = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
    compiled = step.lower(x, w).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.argument_size_in_bytes, compiled.as_text() or ""


TOTAL = 2 * (2048 * 1024 + 1024 * 512)


@needs_cuda
@pytest.mark.parametrize(("name", "count"), [(n, 8) for n in GPUS] + [("gb200", 1), ("h200", 2), ("gb200", 128)])
def test_gpu_programs_compile_sharded(name: str, count: int):
    num_bytes, text = sharded_argument_bytes(get_hardware(name), count)
    assert num_bytes == TOTAL // count
    assert ("all-gather" in text) == (count > 1)


@needs_tpu
@pytest.mark.parametrize(("name", "count"), [("v5e", 8), ("v6e", 8), ("v5p", 1), ("v5p", 128)])
def test_tpu_programs_compile_sharded(name: str, count: int):
    num_bytes, _ = sharded_argument_bytes(get_hardware(name), count)
    assert num_bytes == TOTAL // count


@needs_tpu
@pytest.mark.parametrize("name", TPUS)
def test_tpu_devices_come_in_the_number_asked_for(name: str):
    machine = get_hardware(name)
    per_chip = machine.tpu.devices_per_chip if machine.tpu else 0
    for count in (per_chip, 8, 128, 256):
        devices = compile_only_devices(machine, count)
        assert len(devices) == count
        assert len({tuple(d.coords) for d in devices}) == count // per_chip


@needs_tpu
def test_tpu_compilers_are_quiet_and_may_run_side_by_side():
    code = (
        "from forebay.hardware import get_hardware; from forebay.xla.topology import compile_only_devices;"
        "print(len(compile_only_devices(get_hardware('v5p'), 8))); import time; time.sleep(1)"
    )
    set_by_us = ("TPU_", "ALLOW_MULTIPLE_LIBTPU_LOAD")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(set_by_us)}
    environment["JAX_PLATFORMS"] = "cpu"
    run = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120) for process in run] == [("8\n", "")] * 2


@needs_tpu
def test_the_environment_is_left_as_it_was(monkeypatch):
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    before = dict(os.environ)
    compile_only_devices(get_hardware("v5e"), 1)
    assert dict(os.environ) == before


@pytest.mark.parametrize(("name", "package"), [("h200", "jax-cuda13-plugin"), ("v5p", "libtpu")])
def test_missing_compiler_names_the_extra(monkeypatch, name: str, package: str):
    monkeypatch.setattr(topology, "_installed", lambda _: False)
    with pytest.raises(MissingExtraError, match=rf"{package}.*forebay\[aot\]"):
        compile_only_devices(get_hardware(name), 8)


@needs_tpu
def test_flags_that_would_end_the_process_are_found_first(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hidding_scheduler=true")
    with pytest.raises(UserError, match="latency_hiding_scheduler"):
        compile_only_devices(get_hardware("v5p"), 8)


def test_every_machine_has_devices_for_eight():
    for name, machine in list_hardware().items():
        shape = gpu_topology(machine, 8) if machine.cuda else tpu_shape(machine, 8)
        assert shape, name
