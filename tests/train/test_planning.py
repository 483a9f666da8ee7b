"""Planning for the devices there are: host memory that a run cannot have is refused before it starts."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.errors import UserError
from forebay.hardware import get_hardware, present
from forebay.hardware.present import available_host_bytes, hardware_of
from forebay.train import planning
from forebay.train.config import ProgramConfig
from forebay.train.planning import Compiled, planned_host_bytes, planned_program, refuse_host_bytes, run_plan
from forebay.train.program import make_program
from forebay.train.run_config import TrainConfig
from forebay.xla.options import PROFILE_OPTION
from forebay.xla.topology import compile_only_devices

GIB = 2**30


@pytest.fixture
def roomy(monkeypatch):
    monkeypatch.setattr("forebay.train.planning.available_host_bytes", lambda: (4096 * GIB, "the machine's memory"))


def test_a_pinned_pool_that_is_too_small_is_named_with_its_variable(monkeypatch, roomy):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "1")
    with pytest.raises(
        UserError, match=r"2\.0 GiB in pinned host memory, and the pool may have 1 GiB: set XLA_PJRT"
    ) as error:
        refuse_host_bytes(2 * GIB, 1, "gpu")
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=3" in str(error.value)  # a tenth more than 2
    refuse_host_bytes(GIB, 1, "gpu")
    refuse_host_bytes(2 * GIB, 1, "tpu")  # has no such pool
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    with pytest.raises(UserError, match="may have 64 GiB"):
        refuse_host_bytes(65 * GIB, 8, "gpu")


def test_a_container_with_less_memory_than_its_host_is_believed(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text(f"{2 * GIB}\n")
    monkeypatch.setattr(present, "_CGROUP_FILES", (str(tmp_path / "absent"), str(limit)))
    assert available_host_bytes()[0] == 2 * GIB
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "1000")
    with pytest.raises(UserError, match=r"this process may have 2\.0 GiB .the limit of its control group"):
        refuse_host_bytes(3 * GIB, 1, "gpu")
    limit.write_text("max\n")
    assert available_host_bytes()[0] > 2 * GIB


def test_the_host_bytes_of_a_plan_are_those_of_its_tensors():
    """8 sequences over 8 devices: 2 x 64 MiB of decoder_layer_input and query_proj in 2 layers of Llama 8B."""
    config = ProgramConfig(
        model="llama3.1-8b",
        sizes={"layers": 2},
        batch=8,
        seq=8192,
        placement="decoder_layer_input=host,query_proj=host",
    )
    program = make_program(config, compile_only_devices(get_hardware("h200"), 8))
    activations = 2 * 2 * 8192 * 4096 * 2
    assert planned_host_bytes(program) == activations
    # float32 moments of the weights that are split over 8 devices; those of norms are small and stay
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    weights = (2 * layer + 2 * 128256 * 4096) * 4 // 8
    devices = compile_only_devices(get_hardware("h200"), 8)
    program = make_program(dataclasses.replace(config, optimizer_host_fraction=1.0), devices)
    assert planned_host_bytes(program) == activations + 2 * weights
    hosted = {
        "parameters_host_fraction": 1.0,
        "master_weights": "host",
    }  # bfloat16 copies come in, and gradients go out
    program = make_program(dataclasses.replace(config, **hosted), devices)
    assert planned_host_bytes(program) == activations + 2 * (2 * layer * 2 // 8) + weights


def test_a_cpu_keeps_everything_and_says_that_nothing_was_checked():
    import jax

    program = planned_program(ProgramConfig(batch=8, seq=64), jax.devices()[:1])
    assert [dict(p.tensors) for p in program.plan.placements] == [{"*": "device"}]
    assert not program.plan.verified
    assert any("the memory of a CPU is not checked" in n for n in program.plan.notes)


def test_an_unknown_device_is_refused_with_what_to_do():
    class Device:
        platform = "gpu"
        device_kind = "Some Other Chip"

    with pytest.raises(UserError, match="no machine is known for devices of kind 'Some Other Chip'"):
        hardware_of(Device())


def test_a_resumed_run_goes_on_with_its_own_plan(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    assert run_plan(TrainConfig(run_dir=str(tmp_path), resume=True)).plan == str(tmp_path / "plan.json")
    assert run_plan(TrainConfig(run_dir=str(tmp_path))).plan == "auto"
    assert run_plan(TrainConfig(run_dir=str(tmp_path), resume=True, placement="full")).plan == "auto"


def test_a_plan_made_for_something_else_says_so(tmp_path):
    import jax

    config = ProgramConfig(batch=8, seq=64)
    file = tmp_path / "plan.json"
    planned_program(config, jax.devices()[:1]).plan.save(file)
    other = make_program(ProgramConfig(batch=16, seq=64, plan=str(file)), jax.devices()[:1])
    assert any("the plan was made for batch 8 (here 16)" in note for note in other.notes())
    same = make_program(ProgramConfig(batch=8, seq=64, plan=str(file)), jax.devices()[:1])
    assert not any("the plan was made for" in note for note in same.notes())


@pytest.mark.parametrize(
    ("profile", "placement", "compiles"), [("copies", "full", 0), ("timeline", "full", 1), ("auto", "full", 1)]
)
def test_a_run_is_compiled_with_the_profile_that_it_asks_for(monkeypatch, profile, placement, compiles):
    asked = []

    def compiled(program, hardware, **rest):
        asked.append(program.config.profile)
        step: Any = SimpleNamespace(violations=())
        return Compiled(step, {"profiled": 1}, ("a note",))

    monkeypatch.setattr(planning, "compile_program", compiled)
    config = ProgramConfig(model="llama-tiny", batch=8, seq=64, placement=placement, profile=profile)
    program = make_program(config, compile_only_devices(get_hardware("h200"), 8))
    options, notes = planning.run_options(program, get_hardware("h200"))
    assert len(asked) == compiles and (("profiled" in options), ("a note" in notes)) == (bool(compiles), bool(compiles))


def test_a_machine_that_is_not_known_has_no_times_to_tell(monkeypatch):
    config = ProgramConfig(model="llama-tiny", batch=8, seq=64, placement="full", profile="timeline")
    program = make_program(config, compile_only_devices(get_hardware("h200"), 8))
    options, notes = planning.run_options(program, None)
    assert PROFILE_OPTION not in options and any("profile=timeline does nothing" in n for n in notes)
    by_default = make_program(
        dataclasses.replace(config, profile="auto"), compile_only_devices(get_hardware("h200"), 8)
    )
    options, notes = planning.run_options(by_default, None)
    assert PROFILE_OPTION not in options and not any("profile" in n for n in notes)


def test_a_profile_that_does_not_exist_is_refused():
    config = ProgramConfig(model="llama-tiny", placement="full", profile="timelien")
    with pytest.raises(UserError, match="did you mean 'timeline'"):
        make_program(config, compile_only_devices(get_hardware("h200"), 8))


# ------------------------------------------------------------------ a single layer


def on(hardware, placement="mlpwi_0=host", devices=8, **changes):
    sizes = {"layers": 3, "embed": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "mlp": 64, "vocab": 264}
    config = ProgramConfig(model="llama-tiny", sizes=sizes, batch=8, seq=64, placement=placement, **changes)
    return make_program(config, compile_only_devices(get_hardware(hardware), devices))


def test_a_single_layer_that_is_placed_on_the_host_is_said_to_stay_on_the_device():
    program = on("h200", "mlpwi_0=host@0:2;mlpwi_0=host@2:3")
    (note,) = (n for n in program.notes() if "single layer" in n)
    assert note.startswith("'mlpwi_0' of layers 2:3 of 'layers' stay on the device")
    one, two = (on("h200", f"mlpwi_0=host@0:{n};full@{n}:3") for n in (1, 2))
    assert planning.planned_host_bytes(one) == 0 < planning.planned_host_bytes(two)
