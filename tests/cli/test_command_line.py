"""The command line as a user meets it: one line and exit code 2 for whatever is wrong, and nothing written."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.cli.main import main
from forebay.cli.parse import parse
from forebay.errors import UserError
from forebay.train.config import ProgramConfig
from forebay.train.run_config import TrainConfig, to_yaml

CORPUS = "The water waits above the dam until the turbines can take it.\n" * 200


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(CORPUS)
    return file


@pytest.fixture(autouse=True)
def platform(monkeypatch):
    """`forebay compile` sets this variable for its own process."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def refused(capsys, *argv: str) -> str:
    """The one line on standard error of a command that is refused."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert err.startswith("forebay: ")
    assert err.count("\n") == 1, "one line"
    assert "Traceback" not in out + err
    return err


COMPILE_ERRORS = [
    (["--model", "llama3.1-9b"], "unknown model 'llama3.1-9b': did you mean 'llama3.1-8b'?"),
    (["--hardware", "h20"], "unknown hardware 'h20': did you mean 'h200'?"),
    (["--placement", "quary_proj=host"], "did you mean 'query_proj'?"),
    (["--placement", "minimum"], "unknown placement preset 'minimum': did you mean 'minimal'?"),
    (["--placement", "context=disk"], "unknown placement of 'context' 'disk'"),
    (["--placement", "context=host,context=device"], "places 'context' twice (host and device)"),
    (["--placement", "moe_mlpwi_0=host"], "no activation of layers carries it"),
    (["--placement", "full@0:2"], "no placement for layers 2:4"),
    (["--placement", "full@0:9"], "names layers 0:9, and it has 4 layers"),
    (["--placement", "decoder_layer_input=recompute"], "cannot be recomputed from anything"),
    (["--mesh", "fdsp=8"], "unknown mesh axis 'fdsp': did you mean 'fsdp'?"),
    (["--mesh", "fsdp=4"], "has 4 devices and there are 8"),
    (["--mesh", "fsdp=0,data=8"], "the size of 'fsdp' must be a positive whole number"),
    (["--batch", "12"], "its batch dimension of 12 is not divisible by fsdp=8"),
    (["--batch", "16", "--accumulate", "3"], "batch=16 is not divisible by accumulate=3"),
    (["--batch", "0"], "batch=0 must be at least 1"),
    (["--batch", "many"], "Expected a <class 'int'>"),
    (["--mesh", "tensor=8"], "its heads dimension of 4 is not divisible by tensor=8"),
    (["--sizes.layerz", "3"], "unknown size of llama-tiny 'layerz': did you mean 'layers'?"),
    (["--sizes.layers", "many"], "size layers='many' of llama-tiny"),
    (["--sizes.heads", "3"], "heads=3 is not a multiple of kv_heads=2"),
    (["--dtype", "float8"], "unknown dtype 'float8'"),
    (["--attention", "flesh"], "unknown attention kernel 'flesh'"),
    (["--attention", "splash"], "attention=splash needs a TPU"),
    (["--hardware", "v5e", "--devices", "9"], "v5e does not come in 9 devices"),
    (["--hardware", "gb200", "--devices", "6"], "gb200 does not come in 6 devices"),
    (["--memory_fraction", "1.5"], "the memory fraction 1.5 is not in (0, 1]"),
    (["--plan", "nowhere.json"], "cannot read the plan file 'nowhere.json'"),
    (["--save_hlo", "no/such/folder/x.hlo"], "its directory does not exist"),
    (["--modle", "x"], "unknown flag '--modle': did you mean '--model'?"),
    (["--config", "nowhere.yaml"], "cannot read the configuration file 'nowhere.yaml'"),
    (["surplus"], "unrecognized arguments: surplus"),
]


@pytest.mark.parametrize(("argv", "message"), COMPILE_ERRORS, ids=[" ".join(a) for a, _ in COMPILE_ERRORS])
def test_compile_refuses(capsys, monkeypatch, tmp_path, argv, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, "compile", *argv)
    assert list(tmp_path.iterdir()) == []


def test_unknown_verb_and_usage(capsys):
    assert "unknown verb 'compil': did you mean 'compile'?" in refused(capsys, "compil")
    assert main([]) == 0
    assert "usage: forebay VERB" in capsys.readouterr().out


def test_compile_prints_what_the_format_promises_and_exits_zero_when_it_fits(capsys, tmp_path):
    hlo = tmp_path / "step.hlo"
    argv = ["--hardware", "h200", "--devices", "8", "--seq", "128", "--placement", "mlpwi_0=host", "--json"]
    assert main(["compile", *argv, "--save_hlo", str(hlo)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "forebay.compile/1"
    promised = {"hardware", "devices", "mesh", "hbm_bytes", "fits", "device_bytes", "host_bytes", "peak", "transfers"}
    assert promised | {"remat_clones", "compile_time_s", "versions"} <= report.keys()
    assert set(report["device_bytes"]) == {"arguments", "temporaries", "output", "aliased", "total"}
    assert set(report["host_bytes"]) == {"arguments", "temporaries", "total"}
    assert sum(row["bytes"] for row in report["peak"]) == report["device_bytes"]["total"]
    assert report["fits"] is True
    assert report["mesh"] == {"fsdp": 8}
    # by hand: 4 layers of one sequence of 128 tokens of width 384 in bfloat16
    assert report["host_bytes"]["total"] == 4 * 128 * 384 * 2
    assert report["attention"] == "cudnn"
    assert not any("attention" in note for note in report["notes"])
    assert "is_scheduled=true" in hlo.read_text()[:200]


def test_compile_exits_with_four_when_it_does_not_fit(capsys):
    argv = ["--hardware", "h200", "--devices", "1", "--batch", "1", "--seq", "128", "--memory_fraction", "0.00001"]
    assert main(["compile", *argv, "--placement", "full"]) == 4
    assert "does not fit" in capsys.readouterr().out


def test_not_being_a_residual_is_said(capsys):
    assert (
        main(
            [
                "compile",
                "--hardware",
                "h200",
                "--devices",
                "1",
                "--batch",
                "1",
                "--seq",
                "64",
                "--placement",
                "mlpwo=host",
            ]
        )
        == 0
    )
    assert "'mlpwo' is not a residual of the block of 'layers'" in " ".join(capsys.readouterr().out.split())


TRAIN_ERRORS = [
    (["--seq", "100000"], "100000"),
    (["--data.path", "nothing/*.txt"], "nothing/*.txt"),
    (["--optimizer.warmup_steps", "50", "--steps", "10"], "warmup_steps=50 must be less than steps=10"),
    (["--sizes.vocab", "100"], "the tokenizer has 258 tokens and llama-tiny a vocabulary of 100"),
    (["--weights", "no/such/model"], "no/such/model"),
    (["--resume"], "there is no run with checkpoints"),
    (["--data.pth", "x"], "unknown flag '--data.pth': did you mean '--data.path'?"),
]


@pytest.mark.parametrize(("argv", "message"), TRAIN_ERRORS, ids=[" ".join(a) for a, _ in TRAIN_ERRORS])
def test_train_refuses(capsys, corpus, tmp_path, argv, message):
    run = tmp_path / "run"
    base = ["--data.path", str(corpus), "--run_dir", str(run), "--steps", "60", "--batch", "8", "--seq", "16"]
    assert message in refused(capsys, "train", *base, "--optimizer.warmup_steps", "5", *argv)
    assert not run.exists(), "nothing is left that would block the next try"


def test_an_existing_run_is_never_overwritten(capsys, corpus, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("precious")
    line = refused(capsys, "train", "--data.path", str(corpus), "--run_dir", str(run), "--batch", "8")
    assert "is not empty: choose another --run_dir or continue it with --resume" in line
    assert (run / "config.yaml").read_text() == "precious"
    assert [p.name for p in run.iterdir()] == ["config.yaml"]


def test_xla_flags_that_would_abort_the_process_are_found_before_jax_starts():
    environment = {**os.environ, "XLA_FLAGS": "--xla_gpu_enable_latency_hidding_scheduler=true"}
    command = [str(Path(sys.executable).parent / "forebay"), "compile"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "did you mean '--xla_gpu_enable_latency_hiding_scheduler'" in done.stderr


def test_importing_forebay_imports_neither_jax_nor_anything_heavy():
    code = "import sys, forebay; print([m for m in ('jax', 'numpy', 'rich', 'optax', 'grain') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def parsed(config_class, *argv, **options):
    return parse(config_class, argv, prog="forebay train", description="", **options)


def test_flags_override_files_and_later_files_earlier_ones(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("batch: 1\nseq: 2\noptimizer: {learning_rate: 0.5, beta1: 0.8}\n")
    second.write_text("seq: 3\noptimizer: {learning_rate: 0.25}\n")
    config = parsed(
        TrainConfig, "--config", str(first), f"--config={second}", "--batch", "7", "--optimizer.beta2", "0.9"
    )
    assert (config.batch, config.seq) == (7, 3)
    assert (config.optimizer.learning_rate, config.optimizer.beta1, config.optimizer.beta2) == (0.25, 0.8, 0.9)
    assert config.optimizer.epsilon == TrainConfig().optimizer.epsilon


def test_a_resolved_configuration_reads_back_as_itself(tmp_path):
    config = dataclasses.replace(TrainConfig(), batch=3, sizes={"layers": 2, "tied_embeddings": False}, plan="p.json")
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert parsed(TrainConfig, "--config", str(file)) == config


def test_keys_of_a_sibling_verb_are_passed_over_and_unknown_ones_refused(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("run_dir: somewhere\nbatch: 5\n")
    assert parsed(ProgramConfig, "--config", str(file), also=(TrainConfig,)).batch == 5
    file.write_text("bacth: 5\n")
    with pytest.raises(UserError, match="'bacth': did you mean 'batch'"):
        parsed(ProgramConfig, "--config", str(file))
    file.write_text("optimizer: {lerning_rate: 1}\n")
    with pytest.raises(UserError, match=r"'optimizer\.lerning_rate': did you mean 'optimizer\.learning_rate'"):
        parsed(ProgramConfig, "--config", str(file))


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "just words"])
def test_files_that_are_no_configuration(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml"):
        parsed(ProgramConfig, "--config", str(file))


def test_switches_may_stand_alone_or_have_a_value():
    assert parsed(TrainConfig, "--resume", "--batch", "3").resume is True
    assert parsed(TrainConfig, "--resume", "false").resume is False
    assert parsed(TrainConfig, "--batch", "3", "--resume").resume is True


def test_flags_may_be_written_with_dashes():
    assert parsed(TrainConfig, "--run-dir", "a-b", "--optimizer.learning-rate=0.5").optimizer.learning_rate == 0.5
    assert parsed(TrainConfig, "--run-dir=a-b").run_dir == "a-b"
