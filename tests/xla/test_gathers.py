"""Which of two compiles of a TPU step is kept: weights gathered before their products, or in pieces within them."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from forebay.errors import CompilerFailedError
from forebay.hardware import get_hardware
from forebay.xla.gathers import Trial, are_reduced, better, compile_gathers
from forebay.xla.topology import compile_only_devices
from forebay.xla.windows import Transfer

GIB = 2**30


def step(window=1.0, *, wrong=False, refused=False, gib=1, step_s=None, waits_s=1.0, where="loop") -> Any:
    """A compiled step that copies 2 GiB from the host, with a window, and by its timeline waits."""
    copy = Transfer("mlpwi_0", "layers", "h2d", where, GIB, 2, window)
    return SimpleNamespace(
        transfers=(copy,), violations=("a loop is wrong",) if wrong else (), refused="no memory" if refused else None,
        device=SimpleNamespace(total=gib * GIB), simulated=None if step_s is None else (step_s, waits_s),
    )  # fmt: skip


def kept(whole, pieces=None, **arguments):
    """What is kept of a step and of its other; what is None must not be compiled."""

    def compile_as(in_pieces, save_hlo):
        if save_hlo is not None:
            save_hlo.write_text("pieces" if in_pieces else "whole")
        made = pieces if in_pieces else whole
        assert made is not None, "nothing is to be gained by another compile"
        return made

    made = compile_gathers(compile_as, simulate=lambda compiled: cast(Any, compiled).simulated, **arguments)
    assert made.compiled is (pieces if made.in_pieces else whole)
    return made


@pytest.mark.parametrize("hidden", [step(1.0), step(0.9), step(0.2, where="boundary"), step(0.2, where="update")])
def test_one_compile_is_enough_where_no_copy_in_a_loop_is_exposed(hidden):
    made = kept(hidden)
    assert not made.in_pieces and made.note is None


def test_a_step_that_does_not_wait_for_its_copies_is_compiled_once():
    assert not kept(step(0.5, step_s=2.0, waits_s=0.003)).in_pieces
    with pytest.raises(AssertionError, match="nothing is to be gained"):
        kept(step(0.5, step_s=2.0, waits_s=0.005))
    assert kept(step(0.5, step_s=2.0, waits_s=0.0, wrong=True), step(0.5)).in_pieces


@pytest.mark.parametrize(
    ("whole", "pieces", "in_pieces"),
    [
        (step(0.5), step(1.0), True),
        (step(0.5), step(0.6), True),
        (step(0.6), step(0.5), False),
        (step(0.5), step(0.5), False),  # the same program, it may be
        (step(0.5, step_s=2.0), step(0.5, step_s=1.9), True),
        (step(0.5, step_s=1.9), step(0.5, step_s=2.0), False),
        (step(0.5, step_s=1.9), step(1.0, step_s=2.0), False),  # all hidden, behind work that takes longer
        (step(0.6, step_s=2.0), step(0.5, step_s=1.9), True),
        (step(0.5, step_s=1.9), step(1.0), True),  # without a time for both, what is exposed decides
        (step(0.5), step(1.0, wrong=True), False),
        (step(1.0, wrong=True), step(0.5), True),
        (step(0.5, wrong=True), step(1.0, wrong=True), True),
        (step(0.5), step(1.0, refused=True), False),
        (step(0.5, step_s=2.0), step(1.0, refused=True), False),
        (step(1.0, refused=True), step(0.5), True),
        (step(1.0, refused=True), step(0.5, wrong=True), False),
    ],
)  # fmt: skip
def test_which_of_two_is_kept(whole, pieces, in_pieces):
    made = kept(whole, pieces)
    assert made.in_pieces == in_pieces
    assert (made.note is None) != in_pieces, "said only where the other was kept"


def test_one_that_takes_more_memory_than_it_may_does_not_fit():
    assert not kept(step(0.5, gib=1), step(1.0, gib=3), budget_bytes=2 * GIB).in_pieces
    assert kept(step(1.0, gib=3), step(0.5, gib=1), budget_bytes=2 * GIB).in_pieces
    assert not kept(step(1.0, gib=3)).in_pieces, "any amount"


def test_a_compiler_that_fails_on_the_second_leaves_the_first(tmp_path):
    def compile_as(in_pieces, save_hlo):
        if in_pieces is fails:
            raise CompilerFailedError("the compiler failed")
        save_hlo.write_text("whole")
        return step(0.5)

    fails, file = True, tmp_path / "step.hlo"
    made = compile_gathers(compile_as, simulate=lambda _: None, save_hlo=file)
    assert not made.in_pieces and made.note is not None and made.note.endswith("more copies: the compiler failed")
    assert file.read_text() == "whole" and len(list(tmp_path.iterdir())) == 1
    fails = False
    with pytest.raises(CompilerFailedError):
        compile_gathers(compile_as, simulate=lambda _: None, save_hlo=file)


def test_the_note_says_what_was_gained():
    assert kept(step(0.5, step_s=3.59), step(0.75, step_s=3.41)).note == (
        "weights are gathered in pieces (collective matmul): 512.00 MiB of copies in loops are exposed, "
        "without 1.00 GiB; a step takes 3.410 s by timeline, without 3.590 s"
    )
    assert "the step does not fit" in (kept(step(1.0, refused=True), step(0.5)).note or "")
    assert "copies would be wrong" in (kept(step(1.0, wrong=True), step(0.5)).note or "")


@pytest.mark.parametrize(("pieces", "text"), [(0.9, "pieces"), (0.1, "whole")])
def test_the_hlo_that_is_saved_is_that_of_the_one_that_is_kept(tmp_path, pieces, text):
    file = tmp_path / "step.hlo"
    kept(step(0.5), step(pieces), save_hlo=file)
    assert [f.name for f in tmp_path.iterdir()] == ["step.hlo"] and file.read_text() == text


def test_the_first_of_equals():
    first, second = Trial(False, False, True, 5.0), Trial(True, False, True, 5.0)
    assert better([first, second]) is first and better([second, first]) is second


# ------------------------------------------------------------------ where it matters


@pytest.mark.parametrize(
    ("hardware", "devices", "reduced"),
    [("v5p", 32, False), ("v5p", 64, True), ("v6e", 64, False), ("tpu7x", 32, False), ("tpu7x", 64, True)],
)
def test_libtpu_reduces_whole_matrices_on_large_3d_tori(hardware, devices, reduced):
    """What `are_reduced` says is what the compiler does with a weight that is split over all of them."""
    there = compile_only_devices(get_hardware(hardware), devices)
    assert are_reduced(there) == reduced
    mesh = jax.sharding.Mesh(there, "fsdp")
    split, whole = (jax.NamedSharding(mesh, jax.P(*axis)) for axis in (["fsdp"], []))
    gather = jax.jit(lambda weight: weight.astype("bfloat16"), in_shardings=split, out_shardings=whole)
    hlo = gather.lower(jax.ShapeDtypeStruct((4096, 14336), "float32")).compile().as_text()
    assert hlo is not None and (" all-reduce(" in hlo) == reduced and (" all-gather" in hlo) != reduced


def test_other_devices_gather():
    assert not are_reduced(jax.devices())
    assert not are_reduced(compile_only_devices(get_hardware("gb200"), 64))
