"""Which of two compiles of a TPU step is kept: stores in row-major order, or in the compiler's own."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from forebay.xla.order import Trial, better, compile_ordered
from forebay.xla.windows import Transfer

GIB = 2**30


def step(window=1.0, *, wrong=False, refused=False, gib=1, step_s=None, waits_s=1.0, where="loop") -> Any:
    """A compiled step that copies 2 GiB from the host, with a window, and by its timeline waits."""
    copy = Transfer("mlpwi_0", "layers", "h2d", where, GIB, 2, window)
    return SimpleNamespace(
        transfers=(copy,), violations=("a loop is wrong",) if wrong else (), refused="no memory" if refused else None,
        device=SimpleNamespace(total=gib * GIB), simulated=None if step_s is None else (step_s, waits_s),
    )  # fmt: skip


def kept(row_major, own=None, tensors=3, **arguments):
    """What is kept of a step and of its other; what is None must not be compiled."""

    def compile_as(order, save_hlo):
        if save_hlo is not None:
            save_hlo.write_text("row-major" if order else "own")
        made = row_major if order else own
        assert made is not None, "nothing is to be gained by another compile"
        return made

    made = compile_ordered(
        compile_as, tensors=tensors, simulate=lambda compiled: cast(Any, compiled).simulated, **arguments
    )
    assert made.compiled is (row_major if made.row_major else own)
    return made


@pytest.mark.parametrize("hidden", [step(1.0), step(0.9), step(0.2, where="boundary"), step(0.2, where="update")])
def test_one_compile_is_enough_where_no_copy_in_a_loop_is_exposed(hidden):
    made = kept(hidden)
    assert made.row_major and made.note is None


def test_a_step_that_does_not_wait_for_its_copies_is_compiled_once():
    assert kept(step(0.5, step_s=2.0, waits_s=0.003)).row_major
    with pytest.raises(AssertionError, match="nothing is to be gained"):
        kept(step(0.5, step_s=2.0, waits_s=0.005))
    assert not kept(step(0.5, step_s=2.0, waits_s=0.0, wrong=True), step(0.5)).row_major


def test_of_many_tensors_the_compilers_own_order_comes_first():
    assert not kept(None, step(1.0), tensors=4).row_major
    made = kept(step(0.8), step(0.5), tensors=4)
    assert made.row_major and made.note is not None and "in row-major order: 409.60 MiB of copies" in made.note


@pytest.mark.parametrize(
    ("row_major", "own", "is_row_major"),
    [
        (step(0.5), step(1.0), False),
        (step(0.5), step(0.6), False),
        (step(0.6), step(0.5), True),
        (step(0.5), step(0.5), True),  # the same program, it may be
        (step(0.5, step_s=2.0), step(0.5, step_s=1.9), False),
        (step(0.5, step_s=1.9), step(0.5, step_s=2.0), True),
        (step(0.5), step(1.0, wrong=True), True),
        (step(1.0, wrong=True), step(0.5), False),
        (step(0.5, wrong=True), step(1.0, wrong=True), False),
        (step(0.5), step(1.0, refused=True), True),
        (step(1.0, refused=True), step(0.5), False),
        (step(1.0, refused=True), step(0.5, wrong=True), True),
    ],
)  # fmt: skip
def test_which_of_two_is_kept(row_major, own, is_row_major):
    made = kept(row_major, own)
    assert made.row_major == is_row_major
    assert (made.note is None) == is_row_major, "said only where the other was kept"


def test_one_that_takes_more_memory_than_it_may_does_not_fit():
    assert kept(step(0.5, gib=1), step(1.0, gib=3), budget_bytes=2 * GIB).row_major
    assert not kept(step(1.0, gib=3), step(0.5, gib=1), budget_bytes=2 * GIB).row_major
    assert kept(step(1.0, gib=3)).row_major, "any amount"


def test_the_note_says_what_was_gained():
    assert kept(step(0.5, step_s=3.59), step(0.75, step_s=3.41)).note == (
        "layers store to the host in the compiler's own order of dimensions: 512.00 MiB of copies in loops are exposed, "
        "in the other 1.00 GiB; a step takes 3.410 s by timeline, in the other 3.590 s"
    )
    assert "the step does not fit" in (kept(step(1.0, refused=True), step(0.5)).note or "")
    assert "copies would be wrong" in (kept(step(1.0, wrong=True), step(0.5)).note or "")


@pytest.mark.parametrize(("own", "text"), [(0.9, "own"), (0.1, "row-major")])
def test_the_hlo_that_is_saved_is_that_of_the_one_that_is_kept(tmp_path, own, text):
    file = tmp_path / "step.hlo"
    kept(step(0.5), step(own), save_hlo=file)
    assert [f.name for f in tmp_path.iterdir()] == ["step.hlo"] and file.read_text() == text


def test_the_first_of_equals():
    first, second = Trial(True, False, True, 5.0), Trial(False, False, True, 5.0)
    assert better([first, second]) is first and better([second, first]) is second
