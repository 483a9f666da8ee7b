"""Released compilers with known faults: refused, or used without what they get wrong."""

import pytest

from forebay.errors import EXIT_WRONG_NUMBERS, WrongNumbersError
from forebay.xla import versions as module
from forebay.xla.options import PROFILE_OPTION, compiler_options
from forebay.xla.versions import DOUBLE_BUFFERING, options_without


@pytest.mark.parametrize("version", ["0.10.1", "0.10.2", "0.11.0", "0.11.0.dev20260701"])
def test_releases_with_wrong_gradients_are_refused_in_one_line(version):
    with pytest.raises(WrongNumbersError, match=f"jaxlib {version} must not offload: gradients are wrong") as error:
        options_without("jaxlib", version)
    assert "#46231" in str(error.value) and "\n" not in str(error.value)
    assert error.value.exit_code == EXIT_WRONG_NUMBERS


@pytest.mark.parametrize("version", ["0.8.2", "0.9.1", "0.10.0"])
def test_releases_that_get_double_buffering_wrong_do_without(version):
    assert set(options_without("jaxlib", version)) == {DOUBLE_BUFFERING}


@pytest.mark.parametrize("version", ["0.12.0.1", "0.13.0", "1.0"])
def test_other_releases_are_left_to_the_checks(version):
    assert options_without("jaxlib", version) == {}


def offloading(platform="cuda", offloads=True):
    return compiler_options(platform, deviceless=True, offloads=offloads, environ={})


def install(monkeypatch, version):
    monkeypatch.setattr(module, "versions", lambda: {"jaxlib": "0.12.0.1", "jax-cuda13-pjrt": version})


def test_an_option_that_is_not_trusted_is_dropped_and_the_loss_told(monkeypatch):
    install(monkeypatch, "0.10.0")
    with pytest.warns(UserWarning, match="jax-cuda13-pjrt 0.10.0 is not trusted with it") as warned:
        found = offloading()
    assert DOUBLE_BUFFERING not in found and PROFILE_OPTION in found and len(warned) == 1
    assert "copied once more" in str(warned[0].message)


def test_only_gpu_steps_that_offload_are_refused(monkeypatch):
    install(monkeypatch, "0.11.0")
    with pytest.raises(WrongNumbersError):
        offloading()
    assert offloading(offloads=False)
    assert offloading("tpu") and offloading("cpu") == {}


def test_products_compile_without_timed_kernels_under_older_compilers_too(monkeypatch):
    """jax 0.11.1 has no default for Triton's products, and ends the compile."""
    for version, triton in (("0.11.1", False), ("0.12.0.1", None)):
        install(monkeypatch, version)
        assert offloading(offloads=False).get("xla_gpu_enable_triton_gemm") is triton
