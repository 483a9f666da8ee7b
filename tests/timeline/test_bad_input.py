"""What is no scheduled program is refused in one line that says what to do; exit code 2."""

import json

import pytest
from programs import CONDITION, START, TOY, hlo, kernel, loop, repeated

from forebay.cli.main import main
from forebay.cli.timeline import parse_trip_count
from forebay.errors import UserError
from forebay.timeline import IDEAL, Timeline, timeline

GOOD = hlo(f"{START}\n{loop('w', 'body', 5)}\nROOT {kernel('k', 100)}", CONDITION, repeated("body", kernel("b", 100)))

BAD = {
    "empty": ("", "is empty"),
    "blank": ("\n \n", "is empty"),
    "not HLO": ("for i in range(3):\n  print(i)\n", "is no HLO text"),
    "StableHLO": ("module @jit_step {\n  func.func public @main() {\n  }\n}\n", "is StableHLO or MLIR"),
    "not scheduled": (GOOD.replace("is_scheduled=true, ", ""), "is not scheduled"),
    "cut in the entry": (GOOD[: GOOD.index("ROOT %k")], "was cut off"),
    "cut in a line": (GOOD[: GOOD.index("ROOT %k") + 12], "was cut off"),
    "cut before the entry": (GOOD[: GOOD.index("ENTRY")], "was cut off"),
    "head only": (GOOD.partition("\n")[0] + "\n", "has no computations"),
    "a computation is missing": (GOOD.replace("%body (p", "%bawdy (p"), "calls the computation 'body'"),
}


def refused(capsys, *argv: str) -> str:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("forebay: ")) == ("", 1, True)
    return err


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_texts_that_are_no_scheduled_program(capsys, tmp_path, text, message):
    file = tmp_path / "step.hlo"
    file.write_text(text)
    error = refused(capsys, "timeline", "--hlo", str(file), "--hardware", "h200")
    assert message in error
    assert "--save-hlo" in error, "it says what to do"


def test_an_instruction_that_lacks_its_operands(capsys, tmp_path):
    file = tmp_path / "step.hlo"
    file.write_text(hlo("ROOT %d = f32[] dot(%a, %b), lhs_contracting_dims={0}, rhs_contracting_dims={0}"))
    assert "the instruction 'd' (dot) in 'main' lacks something" in refused(capsys, "timeline", "--hlo", str(file))


def test_names_without_percent_signs_are_read():
    plain = GOOD.replace("%", "")
    assert timeline(plain, TOY, efficiency=IDEAL) == timeline(GOOD, TOY, efficiency=IDEAL)


def test_a_binary_proto(capsys, tmp_path):
    file = tmp_path / "module.pb"
    file.write_bytes(b"\x0a\x08jit_step\x12\x00\xff\xfe" * 10)
    assert "is binary (an HloProto?)" in refused(capsys, "timeline", "--hlo", str(file))
    file.write_bytes(b"\x0a\x08jit_step\x00\x12" * 10)  # bytes that happen to be text
    assert "is binary (an HloProto?)" in refused(capsys, "timeline", "--hlo", str(file))


def test_files_and_directories_that_have_none(capsys, tmp_path):
    assert "cannot read the HLO file" in refused(capsys, "timeline", "--hlo", str(tmp_path / "nowhere.hlo"))
    assert "there is no HLO text in the directory" in refused(capsys, "timeline", "--hlo", str(tmp_path))
    (tmp_path / "module.before.txt").write_text(BAD["not scheduled"][0])
    assert "none of the 1 modules" in refused(capsys, "timeline", "--hlo", str(tmp_path))


def test_of_a_dump_directory_the_largest_scheduled_module_is_taken(tmp_path):
    (tmp_path / "module_0001.helper.after_optimizations.txt").write_text(hlo(f"ROOT {kernel('k', 100)}"))
    (tmp_path / "module_0002.step.after_optimizations.txt").write_text(GOOD)
    (tmp_path / "module_0002.step.before_optimizations.txt").write_text(BAD["not scheduled"][0] * 3)
    (tmp_path / "module_0002.step.memory-usage-report.txt").write_text("bytes\n" * 10000)
    assert timeline(tmp_path, TOY, efficiency=IDEAL).step_time_s == pytest.approx(6)  # of the other one 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--hardware", "h20"], "unknown hardware 'h20'"),
        (["--devices", "0"], "devices=0 must be at least 1"),
        (["--trip_count", "many"], "trip_count='many': write a number"),
        (["--trip_count", "w=-3"], "trip_count='w=-3': write a number"),
        (["--perfetto", "no/such/folder/x.json"], "its directory does not exist"),
        (["--output", "no/such/folder/x.json"], "its directory does not exist"),
        (["--htl", "x"], "unknown flag '--htl'"),
    ],
)
def test_flags(capsys, tmp_path, argv, message):
    file = tmp_path / "step.hlo"
    file.write_text(GOOD)
    assert message in refused(capsys, "timeline", "--hlo", str(file), *argv)


def test_trip_counts_as_they_are_written():
    assert parse_trip_count("") == {}
    assert parse_trip_count("12") == {"": 12}
    assert parse_trip_count("%while.1=12, while.2=3,7") == {"while.1": 12, "while.2": 3, "": 7}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a timeline"),
        ('{"schema": "forebay.plan/1"}', "is not a timeline"),
        ('{"schema": "forebay.timeline/9"}', "reads forebay.timeline/1"),
        ('{"schema": "forebay.timeline/1"}', "is damaged"),
        ('{"schema": "forebay.timeline/1", "step_time_s": 1, "exposed": [{"name": "x"}]}', "is damaged"),
    ],
)
def test_timeline_files(tmp_path, content, message):
    file = tmp_path / "timeline.json"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        Timeline.load(file)


@pytest.mark.parametrize("argv", [[], ["a.json"], ["a.json", "b.json", "c.json"], ["a.json", "--jsn"]])
def test_diff_needs_two_files(capsys, argv):
    assert "needs two files" in refused(capsys, "timeline", "--diff", *argv)


def test_diff_of_what_is_not_there(capsys, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps(timeline(GOOD, TOY).to_json()))
    assert "cannot read the HLO file" in refused(capsys, "timeline", "--diff", str(file), str(tmp_path / "b.json"))
