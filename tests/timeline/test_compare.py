"""A planner's account against a timeline: silent where they agree, and where most of a difference is."""

from typing import Any

from forebay.timeline.compare import difference


def made(step: float, recompute: float = 0.0, remat: float = 0.0, **waits: float) -> dict[str, Any]:
    return {"step_time_s": step, "compute_s": {"recompute": recompute, "compiler_remat": remat}, "waiting_s": waits}


ESTIMATE = {"step_time_s": 10.0, "recompute_s": 2.0, "exposed_s": {"d2h": 0.5, "h2d": 0.5}}


def test_ten_percent_is_agreement():
    assert difference(ESTIMATE, made(10.9)) is None
    assert difference(ESTIMATE, made(9.1)) is None


def test_the_part_that_differs_most_is_named():
    text = difference(ESTIMATE, made(14.0, recompute=2.0, d2h=0.5, h2d=4.0))
    assert text is not None
    assert "14.000 s, +40% against the planner's 10.000 s" in text
    assert "copies from the host: 4.000 s against 500.000 ms" in text


def test_what_the_compiler_recomputes_is_recompute():
    text = difference(ESTIMATE, made(15.0, recompute=2.0, remat=4.0, d2h=0.5, h2d=0.5))
    assert text is not None and "recomputing: 6.000 s against 2.000 s" in text


def test_the_rest_says_what_of_it_waits_for_collectives():
    text = difference(ESTIMATE, made(15.0, recompute=2.0, d2h=0.5, h2d=0.5, collective=3.0))
    assert (
        text is not None and "everything else: 12.000 s against 7.000 s, of which 3.000 s wait for collectives" in text
    )
