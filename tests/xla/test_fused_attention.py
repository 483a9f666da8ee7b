"""Memory of cuDNN's kernels that a compile without a GPU leaves out."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

import forebay
from forebay.hardware import get_hardware
from forebay.ops.attention import cudnn
from forebay.xla.flops import FlopCounter
from forebay.xla.fused_attention import gradient_workspace_bytes, missing_workspaces
from forebay.xla.hlo import parse_module
from forebay.xla.memory import ADDED_WORKSPACE
from forebay.xla.topology import compile_only_devices
from forebay.xla.usage import usage

MiB = 2**20
HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.mark.parametrize(
    ("query", "kv_heads", "value", "capability", "mib"),
    [  # what cuDNN 9.25.1 says: benchmarks/attention/results.md
        ((2, 4096, 16, 64), 16, 64, HOPPER, 32.5),
        ((2, 4096, 16, 128), 4, 128, HOPPER, 128.5),
        ((1, 8192, 128, 128), 8, 128, HOPPER, 1028),
        ((8, 4096, 128, 192), 128, 128, (10, 0), 3088),
        ((1, 8192, 128, 128), 8, 128, AMPERE, 1540),
        ((2, 4096, 16, 64), 16, 64, AMPERE, 64.5),
    ],
)
def test_is_what_cudnn_says(query, kv_heads, value, capability, mib):
    assert gradient_workspace_bytes(query, kv_heads, value, 2, capability) == mib * MiB


def calls(workspace: int, order: str = "0, 2", name: str = "fmhaSoftmaxBackward"):
    """A module of two calls for 2 x 256 positions, one of 4 heads and one of 8, and 2 of keys."""
    lines = []
    for n, heads in enumerate((4, 8)):
        shape = (2, 256, heads, 64) if order == "0, 2" else (2, heads, 256, 64)
        kv = (2, 256, 2, 64) if order == "0, 2" else (2, 2, 256, 64)
        q, k = (f"bf16[{','.join(map(str, s))}]" for s in (shape, kv))
        config = ", ".join(f'"{d}"' for d in order.split(", "))
        lines += [
            f"  %q{n} = {q} parameter({2 * n})",
            f"  %k{n} = {k} parameter({2 * n + 1})",
            f"  %c{n} = ({q}, {k}, {k}, u8[{workspace}]{{0}}) custom-call(%q{n}, %k{n}, %k{n}, %q{n}), "
            f'custom_call_target="__cudnn${name}", backend_config={{"cudnn_fmha_backend_config": '
            f'{{"bmm1_grad_gemm1_dot_dimension_numbers": {{"lhs_batch_dimensions": ["0", "1"], '
            f'"rhs_batch_dimensions": [{config}]}}}}}}',
        ]
    return parse_module("HloModule m, is_scheduled=true\n\nENTRY %main () -> () {\n" + "\n".join(lines) + "\n}\n")


@pytest.mark.parametrize("order", ["0, 2", "0, 1"], ids=["sequence first", "heads first"])
def test_each_call_has_its_own(order):
    rows = 2 * 256 * 8
    assert missing_workspaces(calls(0, order), HOPPER) == {
        "c0": rows // 2 * (64 * 4 + 4 + 2 * 64 * 2),
        "c1": rows * (64 * 4 + 4 + 2 * 64 * 2),
    }


def test_what_the_compiler_asked_cudnn_for_is_not_added_again():
    assert missing_workspaces(calls(1024), HOPPER) == {}


def test_the_forward_kernel_has_none():
    assert missing_workspaces(calls(0, name="fmhaSoftmax"), HOPPER) == {}


@functools.cache
def compiled(kind: str, machine: str, heads: int, kv_heads: int, size: int, value: int):
    there = SingleDeviceSharding(compile_only_devices(get_hardware(machine), 1)[0])
    function = functools.partial(getattr(cudnn, kind), scale=0.1)
    step = jax.jit(function, in_shardings=there, out_shardings=there)

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((2, 4096, *dims), dtype)

    q, k, v, out = shape(heads, size), shape(kv_heads, size), shape(kv_heads, value), shape(heads, value)
    lse = shape(heads, dtype=jnp.float32)
    return forebay.compile_step(step, (q, k, v) if kind == "forward" else (q, k, v, out, lse, out))


@pytest.mark.parametrize(
    ("machine", "heads", "mib"),
    [  # benchmarks/attention/results.md
        ("gb200", (128, 128, 192, 128), 772),
        ("h200", (16, 4, 128, 128), 128.5),
        ("a100", (16, 4, 128, 128), 192.5),
    ],
)
def test_a_compile_without_a_gpu_and_without_cudnn_counts_it(machine, heads, mib):
    step = compiled("backward", machine, *heads)
    assert step.added_bytes == mib * MiB
    rows = {r.name: r.num_bytes for r in step.peak_rows("device")}
    assert rows[ADDED_WORKSPACE] == mib * MiB
    assert sum(rows.values()) == step.device.total
    assert step.device.temporaries >= step.added_bytes
    ((name, size),) = step.scratch.items()
    assert usage(step.assignment, scratch=step.scratch)[name] == usage(step.assignment)[name] + size


@pytest.mark.parametrize("heads", [(128, 128, 192, 128), (16, 4, 128, 128)], ids=["latent", "grouped"])
@pytest.mark.parametrize(("kind", "of_keys", "of_values"), [("forward", 1, 1), ("backward", 3, 2)])
def test_the_products_of_a_compiled_kernel_are_counted(kind, of_keys, of_values, heads):
    module = compiled(kind, "h200", *heads).module
    flops = FlopCounter(module)
    pairs = 2 * heads[0] * 4096 * 4096 / 2  # of two sequences
    found = sum(map(flops.instruction, module.computations[module.entry]))
    assert found == 2 * pairs * (of_keys * heads[2] + of_values * heads[3])
