"""Which part of the step an instruction belongs to, where its metadata alone would mislead."""

import pytest
from programs import CONDITION, START, hlo, kernel, loop, metadata, repeated, timeline

FORWARD = "jit(step)/jvp()/while/body/attention/while/body/exp"
AGAIN = "jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/attention/while"


def in_a_loop(op_name: str) -> str:
    """Five seconds of a kernel of the forward pass in a loop called `op_name`."""
    inside = repeated("inside", kernel("k", 100, FORWARD))
    around = f"{START}\n{loop('w', 'inside', 5)}{metadata(op_name)}\nROOT %end = s8[] constant(0)"
    return hlo(around, CONDITION, inside)


def test_a_loop_that_is_made_again_is_recompute_though_its_body_is_shared_with_the_forward_pass():
    """XLA merges equal computations; the metadata of what is in them are then the first user's."""
    compute = timeline(in_a_loop(AGAIN)).compute_s
    assert compute["recompute"] == pytest.approx(5) and compute["forward"] == 0


def test_a_loop_of_the_forward_pass_is_forward():
    compute = timeline(in_a_loop("jit(step)/jvp()/while/body/attention/while")).compute_s
    assert compute["forward"] == pytest.approx(5) and compute["recompute"] == 0
