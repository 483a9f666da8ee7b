"""Every test runs on eight CPU devices, so that meshes are real and numbers do not depend on the machine."""

import os

# before anything imports jax
os.environ["JAX_PLATFORMS"] = "cpu"
# most of the tests' time is LLVM's, on programs that run for milliseconds: it is told not to optimize. XLA's own passes, which
# decide on memory and order, are all there
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    + os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
)

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import pytest

from forebay.offload import host_buffers
from forebay.sharding import Sharding, make_mesh, parse_mesh

# started here, lest a test that changes XLA_FLAGS be the first to start it, for those after it too
assert jax.device_count() == 8

# Examples compile programs: few of them, the same ones in every run. `--hypothesis-profile=campaign` looks further.
hypothesis.settings.register_profile("default", deadline=None, max_examples=8, derandomize=True, database=None)
hypothesis.settings.register_profile("campaign", deadline=None, max_examples=200, database=None)
hypothesis.settings.load_profile("default")


@pytest.fixture(scope="session")
def sharding_of() -> Callable[[str], Sharding]:
    """The sharding table on a mesh written as on the command line, over as many devices as it needs."""

    def make(text: str) -> Sharding:
        count = 1
        for part in text.split(","):
            count *= int(part.partition("=")[2])
        return Sharding(make_mesh(parse_mesh(text, count), jax.devices()[:count]))

    return make


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


@pytest.fixture(scope="session")
def equations() -> Callable[..., list[Any]]:
    """All equations of a function's jaxpr, those inside loops and nested functions too."""
    return lambda function, *args: list(_equations(jax.make_jaxpr(function)(*args).jaxpr))


@pytest.fixture(scope="module")
def unwritten_host_memory() -> Iterator[None]:
    """What a step's own host buffers hold before it is written is no number, as on a device it may be anything."""

    def anything(dtype: Any, owner: str, number: int) -> Any:
        return (
            jnp.nan
            if jnp.issubdtype(dtype, jnp.inexact)
            else jnp.bool_(True)
            if dtype == jnp.bool_
            else jnp.iinfo(dtype).max
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_buffers, "filling", anything)
        yield
