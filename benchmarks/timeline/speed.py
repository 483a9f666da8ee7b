"""How long a timeline takes and what memory, on large texts: a real step, and made ones of a given size.

    .venv/bin/python benchmarks/timeline/speed.py [STEP.hlo --hardware gb200] [--size-mib 50]

The made program is a step whose layers are not in a loop: blocks of all-gathers, products in fusions,
elementwise kernels and copies to the host, with metadata and back-end configurations as long as XLA's, until the
text has the size. It is worse than a step in a loop, where little text is run often. Results go to `speed.json`,
which `run.py` puts into `results.md`.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
_CONFIG = (
    'backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":false,"is_pipelined":false,'
    '"backend":"DEFAULT"},"force_earliest_schedule":false,"reification_cost":[],"device_type":"DEVICE_TYPE_INVALID"}'
)


def _scope(layer: int, what: str) -> str:
    return (
        f'metadata={{op_name="jit(step)/jvp()/layer_{layer}/{what}/dot_general" scheduling_name="{what}.{layer}" '
        f"stack_frame_id={layer}}}"
    )


def made(size_bytes: int) -> str:
    """HLO text of about that many bytes."""
    fused, entry, size, layer = [], ["%x = bf16[8192,4096]{1,0} parameter(0)"], 0, 0
    while size < size_bytes:
        n = layer
        fused += [
            f"%gemm.{n} (a: bf16[8192,4096], b: bf16[4096,4096]) -> bf16[8192,4096] {{",
            f"  %a.{n} = bf16[8192,4096]{{1,0}} parameter(0)",
            f"  %b.{n} = bf16[4096,4096]{{1,0}} parameter(1)",
            f"  ROOT %dot.{n} = bf16[8192,4096]{{1,0}} dot(%a.{n}, %b.{n}), lhs_contracting_dims={{1}}, "
            f"rhs_contracting_dims={{0}}, {_scope(n, 'mlp')}",
            "}",
            "",
            f"%gelu.{n} (c: bf16[8192,4096]) -> bf16[8192,4096] {{",
            f"  %c.{n} = bf16[8192,4096]{{1,0}} parameter(0)",
            f"  %t.{n} = bf16[8192,4096]{{1,0}} tanh(%c.{n}), {_scope(n, 'gelu')}",
            f"  ROOT %m.{n} = bf16[8192,4096]{{1,0}} multiply(%t.{n}, %c.{n}), {_scope(n, 'gelu')}",
            "}",
            "",
        ]
        before = f"%act.{n - 1}" if n else "%x"
        entry += [
            f'%w.{n} = bf16[512,4096]{{1,0}} parameter({n + 1}), metadata={{op_name="state.weights.{n}"}}',
            f"%ag-start.{n} = ((bf16[512,4096]{{1,0}}), bf16[4096,4096]{{1,0}}) all-gather-start(%w.{n}), channel_id={n}, "
            f"replica_groups=[1,8]<=[8], dimensions={{0}}, {_scope(n, 'gather')}, {_CONFIG}",
            f"%cp-start.{n} = (bf16[8192,4096]{{1,0:S(5)}}, bf16[8192,4096]{{1,0}}, u32[]) copy-start({before}), "
            f"{_scope(n, f'save:layers:mlpwi_{n % 7}')}, {_CONFIG}",
            f"%ag-done.{n} = bf16[4096,4096]{{1,0}} all-gather-done(%ag-start.{n}), {_scope(n, 'gather')}",
            f"%dot_fusion.{n} = bf16[8192,4096]{{1,0}} fusion({before}, %ag-done.{n}), kind=kCustom, calls=%gemm.{n}, "
            f"{_scope(n, 'mlp')}, {_CONFIG}",
            f"%act.{n} = bf16[8192,4096]{{1,0}} fusion(%dot_fusion.{n}), kind=kLoop, calls=%gelu.{n}, {_scope(n, 'gelu')}",
            f"%cp-done.{n} = bf16[8192,4096]{{1,0:S(5)}} copy-done(%cp-start.{n})",
        ]
        size = sum(map(len, fused[-12:])) + sum(map(len, entry[-7:])) + size + 40
        layer += 1
    head = "HloModule made, is_scheduled=true, num_partitions=8\n\n"
    body = "\n".join(f"  {line}" for line in entry)
    return (
        head
        + "\n".join(fused)
        + f"\nENTRY %main (x: bf16[8192,4096]) -> bf16[8192,4096] {{\n{body}\n"
        + (f"  ROOT %end = bf16[8192,4096]{{1,0}} copy(%act.{layer - 1})\n}}\n")
    )


def measure(file: str, hardware: str) -> None:
    """In this process: CPU seconds from the file to the timeline, and the most memory, as JSON."""
    from forebay.timeline.build import timeline

    before, start = time.process_time(), time.perf_counter()
    result = timeline(file, hardware)
    row = {
        "mib": Path(file).stat().st_size / 2**20, "cpu_s": time.process_time() - before,
        "wall_s": time.perf_counter() - start, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "intervals": len(result.spans), "step_time_s": result.step_time_s,
    }  # fmt: skip
    print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hlo", nargs="?", help="a file of scheduled HLO")
    parser.add_argument("--hardware", default="gb200")
    parser.add_argument("--size-mib", type=float, default=50.0, help="of the made program")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.hlo, arguments.hardware)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "made.hlo"
        file.write_text(made(int(arguments.size_mib * 2**20)))
        rows = []
        for what, path in ((arguments.hlo, arguments.hlo), ("a made step without loops", str(file))):
            if path is None:
                continue
            command = [sys.executable, __file__, path, "--hardware", arguments.hardware, "--measure"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append({"what": what if path == str(file) else Path(path).stem} | json.loads(done.stdout))
            print(rows[-1], flush=True)
    (HERE / "speed.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
