"""What the timeline knows of layers with experts: loops that are made again, and the exchange of tokens."""

import pytest
from programs import CONDITION, START, hlo, kernel, loop, metadata, read, repeated, timeline

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


@pytest.mark.parametrize(("source", "target"), [(80, 90), (90, 80)])
def test_an_exchange_sends_the_rows_that_there_are_and_not_the_room_for_them(source, target):
    """There and back between 80 bytes of rows and a buffer that has room for 90."""
    exchange = f"""
        %a = s8[{source}]{{0}} iota(), iota_dimension=0
        %b = s8[{target}]{{0}} iota(), iota_dimension=0
        %o = s32[4]{{0}} iota(), iota_dimension=0
        %r = s8[{target}]{{0}} ragged-all-to-all(%a, %b, %o, %o, %o, %o), replica_groups={{{{0,1,2,3}}}}
        ROOT %end = s8[] constant(0)"""
    [op] = [op for op in read(hlo(exchange)).ops["main"] if op.opcode == "ragged-all-to-all"]
    assert op.work is not None and op.work.collective is not None
    assert op.work.collective.num_bytes == 80
