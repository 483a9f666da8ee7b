"""`forebay plan` as a user types it: plans, files, refusals."""

import json
import subprocess
import sys

import pytest

from forebay.cli.main import main

SIZES = ["--model", "llama3.1-8b", "--sizes.layers", "4", "--seq", "4096"]
SMALL = [*SIZES, "--hardware", "h200", "--devices", "8", "--batch", "8"]


def refused(capsys, *argv: str) -> str:
    """The one line of a refusal."""
    code = main(["plan", *argv])
    captured = capsys.readouterr()
    assert code not in (0, 1)
    assert captured.out == ""
    (line,) = [text for text in captured.err.splitlines() if text.startswith("forebay: ")]
    return line


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    done = subprocess.run(
        [sys.executable, "-m", "forebay.cli.main", "plan", *SMALL, "--hbm", "6GiB", "--max_compiles", "2", "-o",
         str(file), "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return file, json.loads(done.stdout)


def test_a_plan_is_written_compiled_and_within_its_budget(plan_file):
    file, printed = plan_file
    plan = json.loads(file.read_text())
    assert plan["schema"] == printed["schema"] == "forebay.plan/1"
    assert plan["verified"] is True
    assert plan["compiled"]["schema"] == "forebay.compile/1"
    assert plan["compiled"]["device_bytes"]["total"] == plan["predicted"]["device_bytes"] <= 6 * 2**30
    assert plan["model"]["name"] == "llama3.1-8b"
    assert {"device_bytes", "host_bytes", "step_time_s", "exposed_s"} <= plan["predicted"].keys()
    assert {"d2h", "h2d"} == plan["predicted"]["exposed_s"].keys()
    assert {r["tensor"] for r in plan["reasons"]} >= {"decoder_layer_input", "query_proj", "mlpwi_0"}
    names = [row["name"] for row in printed["considered"]]
    assert names[0] == "this plan" and "full" in names


def test_the_file_is_what_compile_proves(plan_file, capsys):
    file, _ = plan_file
    assert main(["compile", *SMALL, "--plan", str(file), "--json"]) == 0
    compiled = json.loads(capsys.readouterr().out)
    plan = json.loads(file.read_text())
    assert compiled["placements"] == plan["placements"]
    assert compiled["device_bytes"]["total"] == plan["predicted"]["device_bytes"]


def test_the_file_is_what_train_runs(plan_file, tmp_path, capsys):
    """The same layers at a size that a CPU can train: a plan belongs to a model, so it is told of the sizes."""
    file, _ = plan_file
    run = tmp_path / "run"
    sizes = {"embed": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "mlp": 96, "vocab": 512}
    arguments = ["--model", "llama3.1-8b", "--sizes.layers", "4"]
    arguments += [text for name, size in sizes.items() for text in (f"--sizes.{name}", str(size))]
    plan = json.loads(file.read_text())
    plan["model"] = None
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    arguments += ["--batch", "8", "--seq", "64", "--steps", "2", "--optimizer.warmup_steps", "1"]
    arguments += ["--validation_batches", "0", "--sample_tokens", "0", "--tensorboard", "false"]
    assert main(["train", *arguments, "--plan", str(file), "--run_dir", str(run)]) == 0
    capsys.readouterr()
    assert json.loads((run / "plan.json").read_text())["placements"] == plan["placements"]


def test_a_plan_for_another_model_is_refused(plan_file, capsys):
    file, _ = plan_file
    arguments = [
        "--model",
        "llama3.1-70b",
        "--hardware",
        "h200",
        "--devices",
        "64",
        "--batch",
        "64",
        "--plan",
        str(file),
    ]
    assert main(["compile", *arguments]) == 2
    assert "the plan was made for llama3.1-8b" in capsys.readouterr().err


def test_the_difference_of_two_plans(plan_file, tmp_path, capsys):
    file, _ = plan_file
    plan = json.loads(file.read_text())
    planned = {p["tensors"].get("query_proj") for p in plan["placements"]}
    where = "device" if "host" in planned else "host"
    plan["placements"] = [{"stack": "layers", "layers": [0, 4], "tensors": {"query_proj": where}}]
    plan["batch"] = 16
    other = tmp_path / "other.json"
    other.write_text(json.dumps(plan))
    assert main(["plan", "diff", str(file), str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"batch": [8, 16]}
    moved = [c for c in found["placements"] if c["tensor"] == "query_proj"]
    assert moved and all(c["after"] == where for c in moved)
    assert main(["plan", "diff", str(file), str(file)]) == 0
    assert "the placements are the same" in capsys.readouterr().out


def test_budgets_that_cannot_be_met_say_what_is_missing(capsys):
    on_device = ["--optimizer_host_fraction", "0", "--parameters_host_fraction", "0"]
    line = refused(
        capsys, "--model", "llama3.1-70b", "--hardware", "h100", "--devices", "8", "--batch", "8", *on_device
    )
    # 70.55 B parameters, four float32 copies over 8 devices: 131.4 GiB
    assert "weights, optimizer state and gradients alone need 131.4" in line
    assert "more devices" in line
    line = refused(capsys, *SMALL, "--hbm", "3.75GiB", *on_device)
    assert "the plan that needs least" in line and "too much" in line and "a smaller batch" in line


def test_refusals(capsys):
    assert "hbm=900GiB: h200 has 141.0 GiB" in refused(capsys, *SMALL, "--hbm", "900GiB")
    assert "cannot read 'much' as a size" in refused(capsys, *SMALL, "--hbm", "much")
    assert "chooses the placement itself" in refused(capsys, *SMALL, "--placement", "full")
    assert "unknown search 'mash': did you mean 'mesh'?" in refused(capsys, *SMALL, "--search", "mash")
    assert "its directory does not exist" in refused(capsys, *SMALL, "-o", "/nonexistent/plan.json")
    assert "is a directory" in refused(capsys, *SMALL, "-o", "/tmp")
    assert "is longer than the" in refused(capsys, *SMALL, "--seq", "99999999999")
    assert "needs two plan files" in refused(capsys, "diff", "one.json")
    assert "cannot read the plan file 'one.json'" in refused(capsys, "diff", "one.json", "two.json")
    assert "max_compiles=0 must be at least 1" in refused(capsys, *SMALL, "--max_compiles", "0")


# what is asked here is which batch and mesh: one compile each, and nothing but activations to decide
ONE_COMPILE = [
    "--model", "llama3.1-8b", "--sizes.layers", "2", "--sizes.vocab", "1024", "--seq", "4096",
    "--hardware", "h200", "--devices", "2", "--batch", "2", "--max_compiles", "1",
    "--optimizer_host_fraction", "0", "--parameters_host_fraction", "0",
]  # fmt: skip


def test_the_largest_batch(capsys, tmp_path):
    picture = tmp_path / "pareto.png"
    assert main(["plan", *ONE_COMPILE, "--hbm", "5.6GiB", "--max_batch", "--json", "--plot", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    batches = [row["batch"] for row in found["considered"] if "mesh" in row]
    assert found["verified"] and found["batch"] >= max(2, max(batches) // 2)
    assert found["predicted"]["device_bytes"] <= 5.6 * 2**30
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_meshes_are_searched(capsys):
    assert main(["plan", *ONE_COMPILE, "--search", "mesh", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    meshes = {row["mesh"] for row in found["considered"] if "mesh" in row}
    assert {"fsdp=2", "data=2", "tensor=2"} <= meshes
