"""Machines of users' own: where they are found, what they inherit, what is said of a wrong file."""

import re
from pathlib import Path

import pytest

from forebay.errors import UserError
from forebay.hardware import get_hardware, list_hardware, read_machines

DOCS = Path(__file__).parents[2] / "docs" / "hardware.md"


@pytest.fixture(autouse=True)
def no_user_files(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("FOREBAY_HARDWARE", raising=False)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_example_of_the_documentation(tmp_path):
    (example,) = re.findall(r"```toml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    machine = read_machines(write(tmp_path / "m.toml", example))["our-h200"]
    assert machine.host.memory_bytes == 10**12
    assert machine.host.memory_bytes_per_device == 125 * 10**9
    assert machine.host_link.d2h_bytes_per_s == 41e9
    assert machine.host_link.d2h_measured_bytes_per_s == 55e9
    assert machine.hbm_bytes == get_hardware("h200").hbm_bytes
    assert machine.cuda == get_hardware("h200").cuda


def test_sources_follow_the_figures(tmp_path):
    """An overridden figure does not keep the source of the one it replaces; the others keep theirs."""
    file = write(
        tmp_path / "m.toml",
        '[mine]\nbase = "gb200"\nhbm_bytes = "180GB"\ncuda = { core_count = 148 }\n'
        'host_link = { d2h_measured_bytes_per_s = 1e11 }\n[mine.sources]\nhost_link = "measured here"\n',
    )
    machine = read_machines(file)["mine"]
    assert machine.hbm_bytes == 180 * 10**9
    assert machine.source("hbm_bytes") == f"given in {file}"
    assert machine.source("cuda.core_count") == f"given in {file}"
    assert machine.source("cuda.l2_cache_bytes") == "XLA target config gb200.txtpb"
    assert machine.source("host_link.d2h_measured_bytes_per_s") == "measured here"
    assert "poolside" not in str(machine.source("host_link.d2h_measured_bytes_per_s"))
    assert machine.source("host.memory_bytes") == get_hardware("gb200").source("host.memory_bytes")


def test_where_files_are_found_and_who_wins(monkeypatch, tmp_path):
    text = '[mine]\nbase = "h200"\nhost = { memory_bytes = "%s" }\n'
    write(tmp_path / "config" / "forebay" / "hardware.toml", text % "1TB")
    assert get_hardware("mine").host.memory_bytes == 10**12
    first = write(tmp_path / "a.toml", text % "2TB")
    second = write(tmp_path / "b.toml", '[other]\nbase = "mine"\n')
    monkeypatch.setenv("FOREBAY_HARDWARE", f"{first}:{second}")
    assert get_hardware("mine").host.memory_bytes == 2 * 10**12
    assert get_hardware("other").host.memory_bytes == 2 * 10**12  # built on the one before it
    third = write(tmp_path / "c.toml", text % "3TB")
    assert get_hardware("mine", [third]).host.memory_bytes == 3 * 10**12
    assert get_hardware("mine").host.memory_bytes == 2 * 10**12


def test_a_machine_may_be_refined_under_its_own_name(tmp_path):
    file = write(tmp_path / "m.toml", '[h200]\nbase = "h200"\nhost = { devices = 4 }\n')
    assert list_hardware([file])["h200"].host.devices == 4
    assert get_hardware("h200").host.devices == 8


def test_bases_within_one_file_in_any_order(tmp_path):
    file = write(tmp_path / "m.toml", '[b]\nbase = "a"\nhbm_bytes = 2\n[a]\nbase = "h100"\nhbm_bytes = 1\n')
    machines = read_machines(file)
    assert (machines["a"].hbm_bytes, machines["b"].hbm_bytes) == (1, 2)


H200 = '[m]\nbase = "h200"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[m\n", "is not TOML: .*line 1"),
        ("m = 3\n", "'m' is not a table"),
        (H200 + "hbm_byte = 1\n", "m: unknown key 'hbm_byte': did you mean 'hbm_bytes'"),
        (H200 + "[m.host_link]\nd2h_bytes_per_s = 1e9\n", "unknown key 'host_link.d2h_bytes_per_s': did you mean"),
        (H200 + 'hbm_bytes = "lots"\n', "m: hbm_bytes: cannot read 'lots' as a size"),
        (H200 + "hbm_bytes = 1.5\n", "hbm_bytes is 1.5: write a whole number"),
        (H200 + "hbm_bytes = true\n", "hbm_bytes is True: write a whole number"),
        (H200 + "hbm_bytes = -1\n", "hbm_bytes is -1: write a number above 0"),
        (H200 + "hbm_bytes = 0\n", "hbm_bytes is 0: write a number above 0"),
        (H200 + "hbm_bytes_per_s = nan\n", "hbm_bytes_per_s is nan: write a number above 0"),
        (H200 + "flops_per_s = { bf16 = inf }\n", "flops_per_s.bf16 is inf"),
        (H200 + "host = 8\n", "host is 8: write a table"),
        (H200 + "host = { devices = 0 }\n", "host.devices is 0"),
        (H200 + "cuda = { compute_capability = [9] }\n", "compute_capability is .*write a list of 2 whole numbers"),
        (H200 + "title = 3\n", "title is 3: write a text in quotes"),
        (H200 + 'name = "x"\n', "name is the section's own"),
        (H200 + "sources = { hbm_bytes = 3 }\n", "sources must be a table of texts"),
        (H200 + 'platform = "rocm"\n', "platform is 'rocm': write one of 'cuda', 'tpu'"),
        (H200 + 'platform = "tpu"\n', r"platform 'tpu' needs a table \[m.tpu\]"),
        ('[m]\nbase = "h20"\n', "m: unknown base 'h20': did you mean 'h200'"),
        ('[m]\nbase = "m"\n', "base 'm' leads back to itself"),
        ('[m]\nbase = "n"\n[n]\nbase = "m"\n', "leads back to itself"),
        ('[m]\nplatform = "cuda"\n', "title is missing"),
        ('[m]\nbase = "v5p"\ntpu = { dimensions = 2 }\n', r"tpu.max_shape is \[16, 20, 28\]: write 2 numbers"),
    ],
)
def test_wrong_files_are_one_line_that_names_file_machine_and_key(tmp_path, text, told):
    file = write(tmp_path / "wrong.toml", text)
    with pytest.raises(UserError, match=told) as caught:
        read_machines(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_files_that_cannot_be_read(monkeypatch, tmp_path):
    with pytest.raises(UserError, match=r"cannot read the hardware file .*No such file"):
        get_hardware("h200", [tmp_path / "absent.toml"])
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not text"):
        read_machines(binary)
    monkeypatch.setenv("FOREBAY_HARDWARE", str(tmp_path))
    with pytest.raises(UserError, match="Is a directory"):
        list_hardware()


def test_a_processor_is_not_described_by_hand(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[mine]\nbase = "h200"\nplatform = "cpu"\n')
    with pytest.raises(UserError, match="platform is 'cpu', which describes itself"):
        read_machines(file, list_hardware())
