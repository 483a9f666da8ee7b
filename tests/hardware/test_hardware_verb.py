"""`forebay hardware`: what is printed, as a table and as JSON."""

import json

import pytest

from forebay.cli.hardware import HardwareArgs, run
from forebay.errors import UserError


@pytest.fixture(autouse=True)
def no_user_files(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("FOREBAY_HARDWARE", raising=False)


def test_table_has_a_row_per_machine_with_the_figures_in_order(capsys):
    assert run(HardwareArgs()) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.split()}
    expected = "184.3 7,928 2,500 5,000 1,250 NVLink-C2C 182 169 224 4 NVLink 5 72 900 50"
    assert rows["gb200"][1:] == expected.split()
    assert "64*" in rows["b200"]
    assert {"a100", "v5e", "tpu7x"} <= rows.keys()


def test_one_machine_with_the_source_of_each_figure(capsys):
    assert run(HardwareArgs(name="tpu7x")) == 0
    out = capsys.readouterr().out
    assert "96.00 GiB  Google Cloud documentation, TPU7x" in out
    assert "unverified: PCIe 5 x16" in out
    assert "Usable HBM 94.74 GiB (what the compiler counts as available)" in out


def test_json(capsys):
    assert run(HardwareArgs(json=True)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "forebay.hardware/1"
    by_name = {machine["name"]: machine for machine in report["hardware"]}
    assert by_name["h200"]["hbm_bytes"] == 151_397_597_184
    assert by_name["v5p"]["tpu"]["max_shape"] == [16, 20, 28]


def test_own_file(capsys, tmp_path):
    file = tmp_path / "m.toml"
    file.write_text('[mine]\nbase = "h200"\nhbm_bytes = "100GiB"\n')
    assert run(HardwareArgs(name="mine", file=str(file))) == 0
    assert f"100.00 GiB  given in {file}" in capsys.readouterr().out
    with pytest.raises(UserError, match="unknown hardware 'mine'"):
        run(HardwareArgs(name="mine"))
