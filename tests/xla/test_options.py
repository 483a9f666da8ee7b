"""Options of a step: what is there, what a build lacks, and a profile of the user's own."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from forebay.offload import scan_layers
from forebay.planner.placement import Placement
from forebay.sharding import make_mesh, parse_mesh
from forebay.xla import options as module
from forebay.xla.estimate import argument_bytes, offloaded_bytes
from forebay.xla.options import (
    MEMORY_LIMIT,
    PIPELINING,
    PROFILE_OPTION,
    TPU_EARLY_STARTS,
    TPU_GATHERS,
    TPU_PIPELINING,
    TPU_SCATTERS,
    TPU_SCHEDULING,
    compiler_options,
    memory_limit_bytes,
    memory_limit_percent,
    variants,
)
from forebay.xla.versions import DOUBLE_BUFFERING


def costs(path: str) -> dict[str, float]:
    found = re.findall(r'name:\s*"([^"]+)"\s+cost_us:\s*([\d.e+]+)', Path(path).read_text())
    assert len(found) == len({name for name, _ in found}), "each name once"
    return {name: float(cost) for name, cost in found}


def offloading(environ: dict[str, str] | None = None):
    return compiler_options("cuda", deviceless=True, offloads=True, environ=environ or {})


def test_only_a_step_that_offloads_gets_the_recipe_of_its_platform():
    both = compiler_options("tpu", deviceless=True, offloads=False)
    assert both == {TPU_GATHERS: "post_spmd_conservative", TPU_SCATTERS: "post_spmd_conservative"}
    moves = compiler_options("tpu", deviceless=True, offloads=True)
    assert moves == both | {TPU_SCHEDULING: "ENABLED", TPU_EARLY_STARTS: True, TPU_PIPELINING: False}
    assert compiler_options("cpu", deviceless=False, offloads=True) == {}
    plain = compiler_options("cuda", deviceless=True, offloads=False)
    assert not {DOUBLE_BUFFERING, PROFILE_OPTION, "xla_gpu_memory_limit_slop_factor"} & set(plain)
    assert set(plain) < set(offloading())
    limited = compiler_options("cuda", deviceless=True, offloads=False, memory_limit_percent=120)
    assert limited == plain | {"xla_gpu_memory_limit_slop_factor": 120}


def test_the_profile_costs_copies_in_both_directions_whatever_their_number():
    found = costs(offloading()[PROFILE_OPTION])
    assert {"wrapped_dynamic-slice", "wrapped_dynamic-update-slice.1", "wrapped_dynamic-slice.200"} <= set(found)
    assert offloading() == offloading(), "the same path every time: it is part of the compile cache's key"


def test_a_profile_of_the_users_own_is_added_to(tmp_path):
    own = tmp_path / "profile.pbtxt"
    own.write_text('costs { name: "fusion.7" cost_us: 3 }\ncosts { name: "wrapped_dynamic-slice.1" cost_us: 42 }\n')
    found = costs(offloading(environ={"XLA_FLAGS": f"--xla_foo=1 --{PROFILE_OPTION}={own}"})[PROFILE_OPTION])
    assert (found["fusion.7"], found["wrapped_dynamic-slice.1"]) == (3, 42)
    assert found["wrapped_dynamic-slice.2"] > 42
    assert "wrapped" in own.read_text() and "slice.2" not in own.read_text(), "the user's file is left alone"


def test_a_profile_that_is_not_text_is_left_as_it_is(tmp_path):
    own = tmp_path / "profile.pb"
    own.write_bytes(b"\x0a\xff\xfe")
    with pytest.warns(UserWarning, match="used as it is"):
        found = offloading(environ={"XLA_FLAGS": f"--{PROFILE_OPTION}={own}"})
    assert PROFILE_OPTION not in found


def test_an_option_that_the_build_lacks_is_dropped_and_the_loss_told(monkeypatch):
    lacking = DOUBLE_BUFFERING
    monkeypatch.setattr(module, "knows_flag", lambda platform, name: name != lacking)
    with pytest.warns(UserWarning, match=f"{lacking}: what is fetched is copied once more") as warned:
        found = offloading()
    assert lacking not in found and PROFILE_OPTION in found and len(warned) == 1


def test_an_option_that_libtpu_lacks_is_dropped_and_the_loss_told(monkeypatch):
    monkeypatch.setattr(module, "knows_flag", lambda platform, name: (platform, name) != ("tpu", TPU_SCHEDULING))
    with pytest.warns(UserWarning, match=f"{TPU_SCHEDULING}: copies from the host") as warned:
        found = compiler_options("tpu", deviceless=True, offloads=True)
    assert set(found) == {TPU_EARLY_STARTS, TPU_PIPELINING, TPU_GATHERS, TPU_SCATTERS} and len(warned) == 1


@pytest.mark.parametrize(
    ("platform", "variable", "name", "value"),
    [
        ("cuda", "XLA_FLAGS", DOUBLE_BUFFERING, "NO_UNROLL"),
        ("cuda", "XLA_FLAGS", MEMORY_LIMIT, "90"),
        ("tpu", "LIBTPU_INIT_ARGS", TPU_GATHERS, "post_spmd"),
        ("tpu", "XLA_FLAGS", TPU_PIPELINING, "true"),
    ],
)
def test_what_the_environment_sets_is_left_to_it_and_the_loss_told(platform, variable, name, value):
    ours = compiler_options(platform, deviceless=True, offloads=True, environ={})
    with pytest.warns(UserWarning, match=f"sets {name}={value}, instead of {ours[name]}: ") as warned:
        found = compiler_options(
            platform, deviceless=True, offloads=True, environ={variable: f'--xla_foo --{name}=x --{name}="{value}"'}
        )
    assert found == {n: v for n, v in ours.items() if n != name} and len(warned) == 1


def test_an_environment_that_sets_the_same_or_what_cannot_be_is_not_worth_a_word():
    ours = offloading()
    scheduler = "xla_gpu_enable_latency_hiding_scheduler"
    found = offloading(
        {"XLA_FLAGS": f"--{scheduler} --xla_gpu_autotune_level=4", "LIBTPU_INIT_ARGS": f"--{MEMORY_LIMIT}=1"}
    )
    assert found == {n: v for n, v in ours.items() if n != scheduler}, "and without a device nothing is timed"


def test_pipelining_that_the_environment_decides_is_not_tried(monkeypatch):
    options = {DOUBLE_BUFFERING: "X", "other": 1}
    monkeypatch.setenv("XLA_FLAGS", f"--{PIPELINING}=false")
    assert list(variants(options)) == [options, {"other": 1}]


def test_variants_begin_with_the_options_themselves():
    options = {DOUBLE_BUFFERING: "X", "other": 1}
    assert list(variants(options)) == [options, options | {PIPELINING: True}, {"other": 1}]
    assert list(variants({"other": 1})) == [{"other": 1}]


@pytest.mark.parametrize(("arguments", "host"), [(0, 0), (100, 50), (20, 400)])
def test_the_limit_leaves_what_is_usable_on_the_device(arguments, host):
    # 200 bytes of HBM of which 180 are usable; XLA's own base is 160 less the arguments
    percent = memory_limit_percent(200, 180, arguments, host)
    limit = memory_limit_bytes(200, arguments, percent)
    assert limit == pytest.approx(180 - arguments + 3 * host, rel=0.01)


def test_the_limit_is_never_below_xlas_own_and_never_negative():
    assert memory_limit_percent(200, 100, 50, 0) == 95
    assert memory_limit_percent(200, 180, 170, 10) >= 95


def test_bytes_before_compiling():
    layers, width, devices = 5, 8, 4
    weights, x = jnp.ones((layers, width, width)), jnp.ones((12, width))

    def loss(weights, x):
        def block(w, x):
            return jnp.sin(checkpoint_name(x @ w, "h"))

        return scan_layers(block, (Placement("layers", (0, layers), {"h": "host"}),), x, weights).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(weights, x).jaxpr
    assert offloaded_bytes(jaxpr, devices) == layers * 12 * width * 4 // devices
    mesh = make_mesh(parse_mesh("fsdp=4", devices), jax.devices()[:devices])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "fsdp"))
    assert argument_bytes({"w": weights}, {"w": split}) == layers * width * width * 4 // devices
