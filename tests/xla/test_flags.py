"""XLA_FLAGS: what XLA would end the process for is one line before it is started, and nothing else is."""

import importlib.util
import os
import subprocess
import sys
import time

import pytest

from forebay.errors import UserError
from forebay.xla.flags import check_flag_text, check_xla_flags, known_flags, tokenise

needs_tpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra aot)")

GOOD = [
    "",
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_latency_hiding_scheduler",
    "  --xla_force_host_platform_device_count=2\t\n--xla_gpu_autotune_level=0  ",
    '--xla_dump_hlo_module_re="a b --xla_nonsense=1" --xla_gpu_autotune_level=0',
    "--xla_dump_hlo_module_re='it \\ is' --xla_gpu_autotune_level=0",
    "--xla_gpu_executable_warn_stuck_timeout=5",  # a flag that is not a field of DebugOptions
]
BAD = [
    ("--xla_gpu_enable_latency_hidding_scheduler=true", "did you mean '--xla_gpu_enable_latency_hiding_scheduler'"),
    ("--xla_gpu_autotune_level=0 --xla_gpu_autotune_levle=0", "did you mean '--xla_gpu_autotune_level'"),
    ("--xla-gpu-autotune-level=0", "did you mean '--xla_gpu_autotune_level'"),
    ("--XLA_GPU_AUTOTUNE_LEVEL=0", "did you mean '--xla_gpu_autotune_level'"),
    ("--noxla_gpu_enable_latency_hiding_scheduler", "write '--xla_gpu_enable_latency_hiding_scheduler=false'"),
    ("-xla_gpu_autotune_level=0", "write two dashes, '--xla_gpu_autotune_level'"),
    ("--xla_tpu_host_transfer_overlap_limit=4", "go into LIBTPU_INIT_ARGS"),
    ("--xla_dump_max_hlo_modules 3", "stops reading at '3'"),
    ("--qqzzj=1", "no flag is named like it"),
    ("--", "no flag is named like it"),
    ("xla_gpu_autotune_level=0", "does not begin with '--', so XLA takes it for a file"),
    (" ", "so XLA takes it for a file"),
]


def check(flags: str, *platforms: str) -> None:
    check_xla_flags(platforms, {"XLA_FLAGS": flags})


def ends_xla(flags: str) -> bool:
    """Whether jax's library really ends the process for these flags."""
    code = "import jaxlib.xla_client as c; c.make_cpu_client()"
    environment = {**os.environ, "XLA_FLAGS": flags}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode != 0


def test_accepted_and_so_does_xla():
    for flags in GOOD:
        check(flags)
    assert not ends_xla(" ".join(GOOD))


@pytest.mark.parametrize(("flags", "told"), BAD)
def test_refused_in_one_line_and_xla_would_end_the_process(flags: str, told: str):
    with pytest.raises(UserError) as caught:
        check(flags)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ends_xla(flags)


def test_words_after_which_xla_reads_nothing_are_refused_though_it_would_run():
    """XLA ignores what follows a stray word: the second flag would silently have no effect."""
    flags = "--xla_gpu_autotune_level=0 stray --xla_nonsense=1"
    assert not ends_xla(flags)
    with pytest.raises(UserError, match="stops reading at 'stray'"):
        check(flags)


def test_a_value_that_is_a_file_name(tmp_path):
    file = tmp_path / "flags"
    file.write_text("--xla_gpu_autotune_level=0\n--xla_gpu_autotune_levle=0\n")
    with pytest.raises(UserError, match="'--xla_gpu_autotune_levle': did you mean"):
        check(str(file))
    assert ends_xla(str(file))
    file.write_text("--xla_gpu_autotune_level=0\n")
    check(str(file))
    assert not ends_xla(str(file))


@pytest.mark.parametrize(
    ("text", "names", "rest"),
    [
        ("--a=1 --b", ["--a", "--b"], ""),
        ('--a="x y"--b=2', ["--a", "--b"], ""),
        ('--a="x \\" --c" --b', ["--a", "--b"], ""),
        ("--a='x \"' --b", ["--a", "--b"], ""),
        ('--a=x"y z', ["--a"], "z"),
        ("--a 3 --b", ["--a"], "3 --b"),
        ("--a.b=1", ["--a"], ""),
        ('--a="unfinished --b', ["--a"], ""),
    ],
)
def test_words_as_xla_reads_them(text: str, names: list[str], rest: str):
    assert tokenise(text) == (names, rest)


def test_all_unknown_names_are_told():
    with pytest.raises(UserError, match=r"xla_gpu_autotune_levle.*xla_dump_too"):
        check_flag_text("--xla_gpu_autotune_levle=0 --xla_dump_too=/tmp")


def test_known_flags_hold_those_that_offloading_needs():
    for platform in ("cpu", "cuda"):
        names = known_flags(platform)
        if names:  # the plugin may not be installed
            assert {"xla_gpu_enable_pipelined_host_offloading", "xla_gpu_memory_limit_slop_factor"} <= names
            assert "xla_gpu_enable_latency_hidding_scheduler" not in names
    with pytest.raises(UserError, match="unknown platform 'rocm'"):
        known_flags("rocm")


@needs_tpu
def test_libtpu_has_lists_of_its_own():
    assert "xla_tpu_host_transfer_overlap_limit" in known_flags("tpu")
    arguments = {"LIBTPU_INIT_ARGS": "--xla_tpu_host_transfer_overlap_limt=4 --noxla_tpu_detect_nan --other=1"}
    check_xla_flags((), arguments)  # nobody reads it unless a TPU is compiled for
    with pytest.raises(UserError, match=r"LIBTPU_INIT_ARGS.*did you mean '--xla_tpu_host_transfer_overlap_limit'"):
        check_xla_flags(("tpu",), arguments)
    check_xla_flags(("tpu",), {"LIBTPU_INIT_ARGS": "--xla_tpu_host_transfer_overlap_limit=4 --noxla_tpu_detect_nan"})
    with pytest.raises(UserError, match="LIBTPU_INIT_ARGS"):
        check_xla_flags((), {**arguments, "JAX_PLATFORMS": "tpu,cpu"})


def test_costs_nothing_without_flags_and_little_with_them():
    code = (
        "import time, sys; from forebay.xla.flags import check_xla_flags;"
        "t = time.perf_counter(); check_xla_flags((), {}); print(time.perf_counter() - t);"
        "t = time.perf_counter(); check_xla_flags((), {'XLA_FLAGS': '--xla_gpu_autotune_level=0'});"
        "print(time.perf_counter() - t, 'jax' in sys.modules or 'jaxlib' in sys.modules)"
    )
    started = time.perf_counter()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert time.perf_counter() - started < 20
    assert float(out[0]) < 0.01
    assert float(out[1]) < 2.0  # one pass over a few hundred MB at worst
    assert out[2] == "False"
