"""Steady step time on the CPU: `forebay train`, a plain JAX loop and MaxText, same shapes, in one run.

    .venv/bin/python benchmarks/cpu_step/run.py --maxtext DIR [--rounds 3]

`DIR` is a folder for MaxText's own environment (about 2 GB); it is made there when it is missing.
Leave `--maxtext` out to compare with the plain loop alone. The three programs run one after another,
`--rounds` times in turn; each contributes the median of its steps after the first three. Results go to
`results.json` and `results.md` beside this file.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
SHAPE = {"layers": 4, "embed": 256, "heads": 4, "head_dim": 64, "mlp": 1024, "vocab": 32000, "batch": 4, "seq": 512}
STEPS, SKIPPED = 15, 3


def forebay(placement: str) -> list[float]:
    sizes = {k: v for k, v in SHAPE.items() if k not in ("batch", "seq")}
    sizes |= {"kv_heads": SHAPE["heads"], "tied_embeddings": "false"}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            str(Path(sys.executable).parent / "forebay"), "train", "--run_dir", str(run_dir), "--model", "llama-tiny",
            "--batch", str(SHAPE["batch"]), "--seq", str(SHAPE["seq"]), "--steps", str(STEPS), "--dtype", "float32",
            "--placement", placement, "--optimizer.warmup_steps", "2", "--sample_tokens", "0", "--validate_every", "0",
        ]  # fmt: skip
        for key, value in sizes.items():
            command += [f"--sizes.{key}", str(value)]
        _run(command)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["step_time_s"] for line in lines if line.get("step_time_s") is not None]


def plain() -> list[float]:
    arguments = [text for key, value in SHAPE.items() for text in (f"--{key}", str(value))]
    return json.loads(_run([sys.executable, str(HERE / "plain_jax.py"), *arguments, "--steps", str(STEPS)]))


def maxtext(environment: Path) -> list[float]:
    python = environment / "bin" / "python"
    if not python.exists():
        _install_maxtext(environment)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "run_name": "t", "hardware": "cpu", "skip_jax_distributed_system": "true", "dtype": "float32",
            "dataset_type": "synthetic", "steps": STEPS, "enable_checkpointing": "false", "base_output_directory": folder,
            "base_emb_dim": SHAPE["embed"], "base_num_decoder_layers": SHAPE["layers"],
            "base_num_query_heads": SHAPE["heads"], "base_num_kv_heads": SHAPE["heads"], "head_dim": SHAPE["head_dim"],
            "base_mlp_dim": SHAPE["mlp"], "vocab_size": SHAPE["vocab"], "max_target_length": SHAPE["seq"],
            "per_device_batch_size": SHAPE["batch"],
        }  # fmt: skip
        command = [str(python), "-m", "maxtext.trainers.pre_train.train", *(f"{k}={v}" for k, v in settings.items())]
        output = _run(command, cwd=folder, DECOUPLE_GCLOUD="TRUE")
    return [float(s) for s in re.findall(r"completed step: \d+, seconds: ([\d.]+)", output)]


def _install_maxtext(environment: Path) -> None:
    _run(["uv", "venv", "--python", sys.executable, str(environment)])
    python = str(environment / "bin" / "python")
    _run(["uv", "pip", "install", "--python", python, "maxtext==0.2.5"])
    requirements = next(environment.rglob("decoupled-requirements.txt"))
    _run(["uv", "pip", "install", "--python", python, "--resolution=lowest", "-r", str(requirements)])


def _run(command: list[str], cwd: str | None = None, **environment: str) -> str:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} ... failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout + (done.stderr if "maxtext" in " ".join(command) else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maxtext", type=Path, default=None, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    programs = {
        "forebay, nothing recomputed": lambda: forebay("none"),
        "forebay, full recompute": lambda: forebay("full"),
        "plain JAX loop, nothing recomputed": plain,
    }
    if arguments.maxtext is not None:
        programs["MaxText 0.2.5, its default (full recompute)"] = lambda: maxtext(arguments.maxtext.resolve())
    medians: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(arguments.rounds):
        for name, program in programs.items():
            medians[name].append(statistics.median(program()[SKIPPED:]))
            print(f"{name}: {medians[name][-1]:.3f} s", flush=True)
    best = {name: statistics.median(values) for name, values in medians.items()}
    ours = {"none": best["forebay, nothing recomputed"], "full": best["forebay, full recompute"]}
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}, jax {metadata.version('jax')}"
    rows = []
    for name, seconds in best.items():
        like = "none" if "nothing" in name else "full"
        rows.append(
            {"program": name, "step_time_s": seconds, "rounds": medians[name], "forebay_ratio": ours[like] / seconds}
        )
    (HERE / "results.json").write_text(json.dumps({"machine": machine, "shape": SHAPE, "rows": rows}, indent=2) + "\n")
    table = [
        "# Steady step time on the CPU", "",
        f"{machine}. Llama of {', '.join(f'{k} {v}' for k, v in SHAPE.items())}, float32, AdamW. Medians over",
        f"{arguments.rounds} rounds in turn. Command: `.venv/bin/python benchmarks/cpu_step/run.py --maxtext DIR`.", "",
        "| program | step, s | forebay with the same placement / this |", "|---|---|---|",
        *(f"| {r['program']} | {r['step_time_s']:.3f} | {r['forebay_ratio']:.2f} |" for r in rows), "",
    ]  # fmt: skip
    (HERE / "results.md").write_text("\n".join(table))
    print("\n".join(table))


if __name__ == "__main__":
    main()
