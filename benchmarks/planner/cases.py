"""What the compiler says of many plans: device and host bytes of Llama at full size, on machines that are not there,
and for GPUs the step time of what was compiled by its timeline.

    .venv/bin/python benchmarks/planner/cases.py [--only gb200]

Compiles each case that `cases.json` does not hold yet for the installed versions, and adds it. The
planner's estimates, made before any compile, are compared with these figures by `run.py`.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FILE = HERE / "cases.json"
MACHINES = ("gb200", "h200", "v6e", "v5p")
MODELS = ("llama3.1-8b", "llama3.1-70b", "llama3.1-405b")
DEVICES = {"llama3.1-8b": 8, "llama3.1-70b": 64, "llama3.1-405b": 128}
PRESETS = (
    "full", "minimal", "minimal_with_context", "save_dot_with_context_except_mlp", "save_dot_except_mlpwi",
    "save_dot_except_mlp", "save_qkv_proj", "save_out_proj", "qkv_proj_offloaded", "minimal_offloaded",
)  # fmt: skip
NAMES = ("decoder_layer_input", "query_proj", "key_proj", "value_proj", "context", "out_proj", "mlpwi_0", "mlpwi_1")
SEQ = 8192


def random_placement(generator: random.Random) -> str:
    """Each tensor anywhere, in one or two ranges."""
    items = []
    for name in NAMES:
        where = generator.choice(
            ["device", "host"] if name == "decoder_layer_input" else ["device", "host", "recompute"]
        )
        items.append(f"{name}={where}")
    return ",".join(items)


def cases() -> list[dict]:
    """Every preset somewhere, random plans everywhere, one and two sequences per device."""
    generator, more = random.Random(0), random.Random(1)
    found = []
    for i, machine in enumerate(MACHINES):
        for j, model in enumerate(MODELS):
            devices = DEVICES[model] * (2 if machine == "v6e" and model == "llama3.1-405b" else 1)
            for per_device in (1, 2):
                # presets in turn, so that each machine and each model sees most of them
                first = (3 * i + 2 * j + per_device) % len(PRESETS)
                placements = [PRESETS[first], PRESETS[(first + 5) % len(PRESETS)], random_placement(generator)]
                if machine in (
                    "gb200",
                    "h200",
                ):  # TPU compilers refuse what does not fit; these say what anything takes
                    placements.append(random_placement(more))
                found += [
                    {
                        "machine": machine,
                        "model": model,
                        "devices": devices,
                        "batch": per_device * devices,
                        "placement": p,
                    }
                    for p in placements
                ]
    return found


def key(case: dict) -> str:
    return "|".join(str(case[k]) for k in ("machine", "model", "devices", "batch", "placement"))


def compile_case(case: dict) -> dict:
    from forebay.timeline import timeline

    with tempfile.TemporaryDirectory() as folder:
        hlo = Path(folder) / "step.hlo"
        command = [
            str(Path(sys.executable).parent / "forebay"), "compile", "--model", case["model"], "--hardware", case["machine"],
            "--devices", str(case["devices"]), "--batch", str(case["batch"]), "--seq", str(SEQ),
            "--placement", case["placement"], "--json", "--save_hlo", str(hlo),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
        if not done.stdout:
            raise SystemExit(f"{key(case)}: {done.stderr.strip()[-500:]}")
        step_s = timeline(hlo, case["machine"]).step_time_s if hlo.exists() and case["machine"][0] != "v" else None
    report = json.loads(done.stdout)
    return case | {
        "step_s": step_s, "remat_clones": report["remat_clones"],
        "device_bytes": report["device_bytes"]["total"], "host_bytes": report["host_bytes"]["total"],
        "compile_time_s": report["compile_time_s"], "fits": report["fits"], "refused": report["refused"] is not None,
        "versions": report["versions"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=None, help="one machine")
    parser.add_argument("--again", action="store_true", help="compile cases anew")
    arguments = parser.parse_args()
    saved = {key(c): c for c in json.loads(FILE.read_text())} if FILE.exists() else {}
    for case in cases():
        if arguments.only in (None, case["machine"]) and (arguments.again or key(case) not in saved):
            saved[key(case)] = compile_case(case)
            FILE.write_text(json.dumps([saved[key(c)] for c in cases() if key(c) in saved], indent=1) + "\n")
            print(key(case), f"{saved[key(case)]['device_bytes'] / 2**30:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
