"""Whether cuDNN has the kernels that `forebay.ops.attention.cudnn.supports` says it has, and how much memory they take.

    pip install --target DIR --no-deps nvidia-cudnn-cu13==9.25.1.1 nvidia-cublas nvidia-cuda-nvrtc
    .venv/bin/python benchmarks/attention/run.py DIR

XLA can have cuDNN choose and build its kernels without a GPU (`xla_gpu_cudnn_deviceless_compilation_mode`; cuDNN 9.23 or
newer, and older than those that want more of the machine's description than this XLA gives: 9.28 does). cuDNN asks the
driver's library only to load what it has built. Where that library is not installed a stand-in takes its place, made with the
C compiler: it says yes to everything. Nothing is run. Writes `results.md` beside this file; the exit code is 1 where
cuDNN disagrees with `supports` or with `gradient_workspace_bytes`.
"""

import ctypes
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MACHINES = ("a100", "h200", "gb200", "gb300")
# batch, sequence, heads, kv heads, size of keys, size of values
SIZES = (
    (1, 1024, 16, 16, 128, 128),
    (2, 4096, 16, 16, 64, 64),
    (2, 4096, 16, 4, 128, 128),
    (1, 8192, 128, 8, 128, 128),
    (2, 4096, 128, 128, 192, 128),
    (8, 4096, 128, 128, 192, 128),
    (2, 4096, 16, 16, 192, 192),
    (2, 4096, 16, 16, 256, 256),
)
MODE = "xla_gpu_cudnn_deviceless_compilation_mode"
# the driver's functions that cuDNN looks up: those that make something, and all others
MAKES = (
    "LibraryLoadData",
    "LibraryLoadFromFile",
    "LibraryGetKernel",
    "KernelGetFunction",
    "ModuleLoadData",
    "ModuleGetFunction",
)
OTHERS = (
    "CtxGetCurrent", "CtxGetLimit", "CtxPopCurrent", "CtxPushCurrent", "DeviceGet", "DeviceGetCount", "GetErrorName",
    "GetErrorString", "KernelGetAttribute", "KernelSetAttribute", "LaunchCooperativeKernel", "LaunchKernel", "LaunchKernelEx",
    "LibraryUnload", "LinkAddData", "LinkComplete", "LinkCreate", "LinkDestroy", "ModuleUnload",
    "OccupancyMaxPotentialClusterSize", "StreamGetCtx", "TensorMapEncodeIm2col", "TensorMapEncodeTiled",
)  # fmt: skip
MiB = 2**20


def with_libraries(folder: Path) -> int:
    """This script again, with the libraries of `folder` in reach."""
    nvidia = folder.resolve() / "nvidia"
    found = [str(nvidia / "cudnn" / "lib"), str(nvidia / "cu13" / "lib")]
    with tempfile.TemporaryDirectory() as made:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            stand_in(Path(made))
            found.insert(0, made)
        environment = os.environ | {
            "PYTHONPATH": str(folder.resolve()), "LD_LIBRARY_PATH": ":".join(found), "JAX_PLATFORMS": "cpu", "ASK": "1",
        }  # fmt: skip
        return subprocess.run([sys.executable, __file__], env=environment).returncode


def stand_in(folder: Path) -> None:
    lines = ["int cuDriverGetVersion(int *version) { *version = 13000; return 0; }"]
    lines += [f"int cu{name}(void **made) {{ *made = (void *)4096; return 0; }}" for name in MAKES]
    lines += [f"int cu{name}(void) {{ return 0; }}" for name in OTHERS]
    source = folder / "libcuda.c"
    source.write_text("\n".join(lines) + "\n")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1", source], check=True
    )


def asked(machine: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """What cuDNN says of the two kernels, and what forebay says."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from forebay.hardware import get_hardware
    from forebay.ops.attention import cudnn
    from forebay.xla.fused_attention import gradient_workspace_bytes
    from forebay.xla.hlo import arrays_of, parse_module
    from forebay.xla.topology import compile_only_devices, compute_capability

    device = compile_only_devices(get_hardware(machine), 1)[0]
    B, S, H, G, K, V = sizes

    def shape(*dims, dtype: Any = jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype)

    inputs = (shape(B, S, H, K), shape(B, S, G, K), shape(B, S, G, V))
    results = (shape(B, S, H, V), shape(B, S, H, dtype=jnp.float32))
    row: dict[str, Any] = {"machine": machine, "sizes": sizes}
    for name, function, arguments in (
        ("forward", cudnn.forward, inputs),
        ("backward", cudnn.backward, (*inputs, *results, results[0])),
    ):
        there = SingleDeviceSharding(device)
        step = jax.jit(functools.partial(function, scale=0.1), in_shardings=there, out_shardings=there)
        try:
            done = step.lower(*arguments).compile(compiler_options={MODE: "CUDNN_DEVICELESS_COMPILATION_ALWAYS"})
        except jax.errors.JaxRuntimeError as error:
            row[name] = None
            row["says"] = str(error).splitlines()[0].split(" in external/")[0]
            continue
        calls = [i for i in parse_module(done.as_text() or "").instructions() if "__cudnn$fmha" in i.rest]
        row[name] = sum(arrays_of(i.shape)[-1].num_bytes for i in calls)
    capability = compute_capability(device)
    row["supported"] = cudnn.supports(K, V, jnp.bfloat16, capability)
    row["worked_out"] = gradient_workspace_bytes((B, S, H, K), G, V, 2, capability)
    return row


def main() -> int:
    from forebay.xla.versions import versions

    rows = [asked(machine, sizes) for machine in MACHINES for sizes in SIZES]
    found = {k: v for k, v in versions().items() if k in ("jax", "jaxlib", "jax-cuda13-pjrt", "nvidia-cudnn-cu13")}
    lines = [
        "# cuDNN's attention: which heads, and its own memory", "",
        "What cuDNN says when XLA has it build its kernels for GPUs that are not there; nothing was run. Command: see",
        "`benchmarks/attention/run.py`; " + ", ".join(f"{k} {v}" for k, v in found.items()) + ".", "",
        "| machine | batch, sequence | heads, of keys | head sizes | cuDNN has both kernels | `supports` | gradient's own MiB | "
        "worked out |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    wrong = []
    for row in rows:
        B, S, H, G, K, V = row["sizes"]
        has = None not in (row["forward"], row["backward"])
        own = f"{row['backward'] / MiB:,.1f}" if has else ""
        guess = f"{row['worked_out'] / MiB:,.1f}" if row["supported"] else ""
        lines.append(
            f"| {row['machine']} | {B}, {S} | {H}, {G} | {K}, {V} | {'yes' if has else 'no'} | "
            f"{'yes' if row['supported'] else 'no'} | {own} | {guess} |"
        )
        if row["supported"] and not (has and abs(row["backward"] - row["worked_out"]) <= 4096):
            wrong.append(f"{row['machine']} {row['sizes']}: {row.get('says', lines[-1])}")
    lines += ["", "What cuDNN has and `supports` leaves out are sizes that only its newer releases have on Blackwell."]
    (HERE / "results.md").write_text("\n".join(lines) + "\n")
    print("\n".join(wrong) or f"cuDNN agrees in all {sum(r['supported'] for r in rows)} cases that are used")
    return 1 if wrong else 0


if __name__ == "__main__":
    if "ASK" in os.environ:
        sys.exit(main())
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(with_libraries(Path(sys.argv[1])))
