"""Buffer assignments written by hand: what is live when, and which values are one buffer."""

from pathlib import Path

import pytest

from forebay.errors import UserError
from forebay.xla.buffers import peak, read_assignment
from forebay.xla.hlo import parse_module
from forebay.xla.usage import usage

# A loop that carries 100 bytes (init -> p -> updated -> loop) beside two temporaries of the body:
# `a` lives while `b` starts, `c` comes after both and reuses the place of `a`.
HLO = """\
HloModule m, is_scheduled=true

%body (p: (f32[25])) -> (f32[25]) {
  %p = (f32[25]{0}) parameter(0)
  %a = f32[10]{0} negate(%x)
  %b = f32[5]{0} negate(%y)
  %c = f32[10]{0} negate(%z)
  %updated = f32[25]{0} negate(%w)
  ROOT %root = (f32[25]{0}) tuple(%updated)
}

%cond (q: (f32[25])) -> pred[] {
  %q = (f32[25]{0}) parameter(0)
  ROOT %done = pred[] constant(true)
}

ENTRY %main (arg: f32[25]) -> f32[25] {
  %arg = f32[25]{0} parameter(0)
  %init = f32[25]{0} broadcast(%zero)
  ROOT %loop = (f32[25]{0}) while(%init_tuple), condition=%cond, body=%body
}
"""
ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 100, page 0, parameter 0, shape |f32[25]| at ShapeIndex {}, maybe-live-out:
 value: <0 arg @0> (size=100,offset=0): f32[25]{0}
allocation 1: size 4, page 0, thread-local:
 value: <9 scalar @0> (size=4,offset=0): f32[]
allocation 2: size 192, page 0, preallocated-temp:
 value: <1 init @0> (size=100,offset=0): f32[25]{0}
 value: <2 a @0> (size=40,offset=128): f32[10]{0}
 value: <3 b @0> (size=20,offset=172): f32[5]{0}
 value: <4 c @0> (size=40,offset=128): f32[10]{0}
 value: <5 updated @0> (size=100,offset=0): f32[25]{0}
 value: <6 p{0} (phi) @0> (size=100,offset=0): f32[25]{0}
 value: <7 loop{0} (phi) @0> (size=100,offset=0): f32[25]{0}
allocation 3: size 1000, color 5, page 0, preallocated-temp:
 value: <8 kept @5> (size=1000,offset=0): f32[250]{0:S(5)}
"""
VALUES = """\

Used values:
<0 arg @0>
 positions:
  arg
 uses:
  (none)
 from instruction: %arg = f32[25]{0} parameter(0), metadata={op_name="state.weights"}
<1 init @0>
 positions:
  init
  init_tuple {0}
 uses:
  loop, operand 0 {0}
 from instruction: %init = f32[25]{0} broadcast(%zero)
<2 a @0>
 positions:
  a
 uses:
  b, operand 0
 from instruction: %a = f32[10]{0} negate(%x)
<5 updated @0>
 positions:
  updated
  root {0}
 uses:
  root, operand 0
 from instruction: %updated = f32[25]{0} negate(%w), metadata={op_name="body/save:layers:query_proj/dus"}
<6 p{0} (phi) @0>
 positions:
  p {0}
 uses:
  (none)
 from instruction: %p = (f32[25]{0}) parameter(0)
<7 loop{0} (phi) @0>
 positions:
  loop {0}
 uses:
  (none)
 from instruction: %loop = (f32[25]{0}) while(%init_tuple), condition=%cond, body=%body
"""
LIVE = """\
HloLiveRange (max 9):
  InstructionSequence:
    0:arg
    1:init
    2:p
    3:a
    4:b
    5:c
    6:updated
    7:root
    8:loop
  BufferLiveRange:
    arg{}:0-9
    init{}:1-2
    p{0}:2-7
    a{}:3-4
    b{}:4-6
    c{}:5-6
    updated{}:7-8
    loop{0}:8-9
  Live ranges at 5 (peak):
    p{0}: 100 bytes
"""


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    (tmp_path / "m.buffer-assignment.txt").write_text(ASSIGNMENT)
    (tmp_path / "m.buffer-assignment-values.txt").write_text(VALUES)
    (tmp_path / "m.live-range.txt").write_text(LIVE)
    return tmp_path


def test_allocations_have_kind_place_and_donation(dump):
    assignment = read_assignment(dump, parse_module(HLO))
    assert [(a.kind, a.num_bytes, a.on_host, a.live_out) for a in assignment.allocations] == [
        ("parameter", 100, False, True),
        ("thread-local", 4, False, False),
        ("temporary", 192, False, False),
        ("temporary", 1000, True, False),
    ]
    assert assignment.allocations[0].parameter == 0


def test_values_of_one_loop_variable_are_one_buffer(dump):
    assignment = read_assignment(dump, parse_module(HLO))
    assert assignment.aliases[1] == {1, 5, 6, 7}
    assert 2 not in assignment.aliases  # `a` shares its place with `c` at another time, not its buffer


def test_peak_counts_shared_bytes_once_and_the_rest_as_unused(dump):
    # by hand: at position 4, p (0..100), a (128..168) and b (172..192) are live: 160 of 192 bytes;
    # at 5 and 6 c has the place of a: 160 as well, and the first such moment is taken
    assignment = read_assignment(dump, parse_module(HLO))
    held, unused = peak(assignment, assignment.allocations[2])
    assert sorted(h.num_bytes for h in held) == [20, 40, 100]
    assert unused == 32
    carried = next(h for h in held if h.num_bytes == 100)
    assert {v.name for v in carried.values} == {"init", "p", "updated", "loop"}
    assert carried.values[0].name == "p"  # the value that is live comes first
    assert {v.name for h in held for v in h.values if h.num_bytes == 40} == {"a"}


def test_usage_over_the_schedule(dump):
    # 100 of the argument, always; of the temporaries init, p, updated and loop have one place, and c has that of a
    assignment = read_assignment(dump, parse_module(HLO))
    temporaries = {
        "arg": 0,
        "init": 100,
        "p": 100,
        "a": 140,
        "b": 160,
        "c": 160,
        "updated": 160,
        "root": 100,
        "loop": 100,
    }
    assert usage(assignment) == {name: 100 + size for name, size in temporaries.items()}
    _, unused = peak(assignment, assignment.allocations[2])
    assert max(usage(assignment).values()) + unused == 100 + 192


def test_a_compiler_that_does_not_dump_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"no \*buffer-assignment.txt"):
        read_assignment(tmp_path, parse_module(HLO))
