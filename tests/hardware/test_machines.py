"""The table of machines: complete, sourced, consistent with figures that are known from elsewhere."""

import subprocess
import sys

import pytest

from forebay.errors import UserError
from forebay.hardware import Hardware, get_hardware, list_hardware
from forebay.report.hardware import figures

REQUIRED = ("a100", "h100", "h200", "gh200", "b200", "gb200", "gb300", "v5e", "v5p", "v6e", "tpu7x")
GiB = 2**30


@pytest.fixture(autouse=True)
def no_user_files(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("FOREBAY_HARDWARE", raising=False)


MACHINES = [get_hardware(name) for name in REQUIRED]
each_machine = pytest.mark.parametrize("machine", MACHINES, ids=REQUIRED)


@each_machine
def test_every_figure_has_a_source_that_is_not_the_file_itself(machine: Hardware):
    missing = [path for path, _ in figures(machine) if not machine.source(path)]
    assert missing == []
    assert not any("machines.toml" in source or "://" in source for source in machine.sources.values())


@each_machine
def test_no_source_names_a_key_that_is_not_there(machine: Hardware):
    paths = [path for path, _ in figures(machine)]
    assert [s for s in machine.sources if not any(p == s or p.startswith(s + ".") for p in paths)] == []


@each_machine
def test_physical_order_of_the_rates(machine: Hardware):
    """HBM is faster than the fabric, the fabric than the network; measuring never exceeds nominal."""
    link, fabric = machine.host_link, machine.interconnect
    assert machine.hbm_bytes_per_s > fabric.domain_bytes_per_s > fabric.network_bytes_per_s
    assert link.d2h_bytes_per_s <= link.d2h_nominal_bytes_per_s
    assert link.h2d_bytes_per_s <= link.h2d_nominal_bytes_per_s
    assert 0 < machine.usable_hbm_bytes() < machine.hbm_bytes
    assert machine.host.devices % machine.host.devices_per_cpu == 0


@each_machine
def test_rates_agree_with_the_clock_of_the_units(machine: Hardware):
    """Tensor cores: multiply-adds per SM and cycle are a power of two; fp8 is twice bf16, tf32 half (NVIDIA)."""
    if machine.cuda is None:
        pytest.skip("TPUs list no clock")
    per_cycle = machine.flops_per_s["bf16"] / machine.cuda.core_count / (machine.cuda.clock_ghz * 1e9) / 2
    expected = {8: 1024, 9: 2048, 10: 4096}[machine.cuda.compute_capability[0]]
    assert per_cycle == pytest.approx(expected, rel=0.1)
    assert machine.flops_per_s["tf32"] == pytest.approx(machine.flops_per_s["bf16"] / 2, rel=0.03)
    if "fp8" in machine.flops_per_s:
        assert machine.flops_per_s["fp8"] == pytest.approx(2 * machine.flops_per_s["bf16"], rel=0.001)


def test_figures_that_plans_rest_on():
    gb200, v5p, tpu7x = get_hardware("gb200"), get_hardware("v5p"), get_hardware("tpu7x")
    assert gb200.hbm_bytes == 197_897_748_480
    assert gb200.usable_hbm_bytes() / GiB == pytest.approx(165.9, abs=0.05)  # 0.9 x 184.3
    assert gb200.usable_hbm_bytes(0.75) == 148_423_311_360
    assert gb200.host.memory_bytes_per_device / GiB == pytest.approx(223.5, abs=0.1)  # 480 GB for two GPUs
    assert gb200.host_link.d2h_bytes_per_s == 182e9  # all GPUs active, not the 185e9 of one alone
    assert get_hardware("h200").host_link.d2h_bytes_per_s == 55e9  # measured, not the nominal 64e9
    assert get_hardware("b200").host_link.h2d_bytes_per_s == 64e9  # nominal: nobody measured it
    assert v5p.usable_hbm_bytes() / GiB == pytest.approx(95.73, abs=0.001)
    # one TPU7x chip is two devices: 192 GiB, 2307 TFLOP/s
    assert 2 * tpu7x.hbm_bytes == 192 * GiB
    assert 2 * tpu7x.flops_per_s["bf16"] == 2307e12


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01, float("nan")])
def test_memory_fraction_outside_its_range(fraction: float):
    with pytest.raises(UserError, match="memory fraction"):
        get_hardware("h200").usable_hbm_bytes(fraction)


def test_unknown_hardware_names_the_closest():
    with pytest.raises(UserError, match="unknown hardware 'gb20': did you mean 'gb200'"):
        get_hardware("gb20")


def test_json_is_plain_and_complete():
    data = get_hardware("gb300").to_json()
    assert data["cuda"]["compute_capability"] == [10, 3]
    assert data["usable_hbm_bytes"] == 267_318_971_596  # int(0.9 x 297021079552)
    assert data["host"]["memory_bytes_per_device"] == 240_000_000_000
    assert "tpu" not in data
    assert next(iter(list_hardware())) == "a100"


def test_knows_nothing_of_jax():
    code = "import sys, forebay.hardware as h; h.get_hardware('h200'); print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
