"""The profile of a compiled step's own times: what is in it, and when a second compile under it is kept."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import (
    CONDITION,
    START,
    TOY,
    WIDE,
    all_gather,
    argument,
    from_host,
    gathered,
    hlo,
    kernel,
    loop,
    on_device,
    on_host,
    product,
    repeated,
    to_host,
)

from forebay.errors import CompilerFailedError
from forebay.timeline import IDEAL
from forebay.timeline.profile import costs_us, profiled
from forebay.xla.load import module_of
from forebay.xla.options import PROFILE_OPTION, compiler_options, with_profile

approx = pytest.approx
ENDS = "ROOT %end = () tuple()"


def module(*entry: str, others: tuple[str, ...] = ()) -> Any:
    return module_of(hlo("\n".join((*entry, ENDS)), *others))


def profile(options: Any) -> dict[str, float]:
    text = Path(options[PROFILE_OPTION]).read_text()
    found = re.findall(r'name:\s*"([^"]+)"\s+cost_us:\s*([\d.e+]+)', text)
    assert len(found) == len(dict(found)), "each name once"
    return {name: float(us) for name, us in found}


# --- what is in it ------------------------------------------------------------------------------------


def test_kernels_and_products_take_their_time_alone():
    made = costs_us(module(kernel("a", 200), product("b", 3000)), WIDE, 4, IDEAL)
    assert made == {"b": approx(3e6)}, "what takes no time is not in it: memory is never short here"
    assert costs_us(module(kernel("a", 200)), TOY, 4, IDEAL) == {"a": approx(2e6)}


def test_a_collective_takes_from_start_to_done_under_the_name_of_its_start():
    # 4 x 100 bytes gathered: three quarters of them come over a link of 50 B/s
    step = module(argument("x", 100), all_gather("g", 100, "x"), kernel("a", 500), gathered("d", 400, "g"))
    assert costs_us(step, TOY, 4, IDEAL) == {"g": approx(6e6), "a": approx(5e6)}


def test_copies_between_device_and_host_are_left_out():
    step = module(
        argument("a", 10), argument("h", 10, 1, host=True), to_host("out", 10), from_host("in", 10), kernel("k", 100),
        on_host("there", 10, "out"), on_device("here", 10, "in"),
    )  # fmt: skip
    assert set(costs_us(step, TOY, 4, IDEAL)) == {"k"}


def test_a_loop_takes_all_its_iterations_and_its_kernels_one():
    inner = repeated("body", kernel("a", 100), kernel("b", 200))
    made = costs_us(module(START, loop("w", "body", 7), others=(CONDITION, inner)), TOY, 4, IDEAL)
    assert made == {"w": approx(21e6), "a": approx(1e6), "b": approx(2e6)}


def test_the_profile_has_the_costs_and_copies_longer_than_any_of_them():
    options = compiler_options("cuda", deviceless=True, offloads=True, environ={})
    made = with_profile(options, "cuda", {"dot.1": 30000.0, "all-gather-start.2": 2460.25}, environ={})
    assert made is not None and {k: v for k, v in made.items() if k != PROFILE_OPTION} == {
        k: v for k, v in options.items() if k != PROFILE_OPTION
    }
    costs = profile(made)
    assert (costs["dot.1"], costs["all-gather-start.2"]) == (30000.0, 2460.25)
    assert costs["wrapped_dynamic-slice.3"] >= 100 * 30000.0


def test_a_step_that_moves_nothing_gets_a_profile_too():
    plain = compiler_options("cuda", deviceless=True, offloads=False)
    made = with_profile(plain, "cuda", {"dot.1": 7.0}, environ={})
    assert made is not None and profile(made)["dot.1"] == 7
    assert with_profile({}, "tpu", {"dot.1": 7.0}, environ={}) is None


def test_what_the_users_own_profile_says_stays(tmp_path):
    own = tmp_path / "own.pbtxt"
    own.write_text('costs { name: "dot.1" cost_us: 3 }\ncosts { name: "mine" cost_us: 4 }\n')
    made = with_profile({}, "cuda", {"dot.1": 7.0, "dot.2": 8.0}, environ={"XLA_FLAGS": f"--{PROFILE_OPTION}={own}"})
    assert made is not None
    costs = profile(made)
    assert (costs["dot.1"], costs["mine"], costs["dot.2"]) == (3, 4, 8)


# --- when it is kept -----------------------------------------------------------------------------------

WAITS = module(argument("x", 100), all_gather("g", 100, "x"), gathered("d", 400, "g"), product("a", 5000))
"""An all-gather before work that does not need it: 300 bytes at 0.8 x 50 B/s, 5000 FLOPs at 0.78 x 1000 FLOP/s."""
HIDES = module(argument("x", 100), all_gather("g", 100, "x"), product("a", 5000), gathered("d", 400, "g"))
"""The same with the work beside it."""


def step(module: Any, **changes: Any) -> Any:
    about = {
        "module": module, "refused": None, "violations": (), "transfers": (),
        "device": SimpleNamespace(total=100), "remat": SimpleNamespace(count=0),
    }  # fmt: skip
    return SimpleNamespace(**(about | changes))


def copy(window: float) -> Any:
    return SimpleNamespace(where="loop", window=window, num_bytes=1, count=1)


def tried(first: Any, second: Any, usable: int = 120) -> Any:
    asked: list[Any] = []

    def again(options: Any) -> Any:
        asked.append(options)
        return second

    made = profiled(first, {"other": 1}, WIDE, 4, usable, again)
    assert made.kept is (made.compiled is second)
    assert all(PROFILE_OPTION in options and options["other"] == 1 for options in asked)
    return made, asked


def test_what_is_faster_is_kept_with_its_options():
    made, asked = tried(step(WAITS), step(HIDES))
    assert made.kept and made.options is asked[0]
    assert "scheduled with the timeline's times" in made.note and "-" in made.note
    gather, work = 300 / (0.8 * 50), 5000 / (0.78 * 1000)
    assert made.before_s == approx(gather + work, rel=1e-3) and made.after_s == approx(max(gather, work), rel=1e-3)
    costs = profile(made.options)
    assert (costs["g"], costs["a"]) == (approx(1e6 * gather, rel=1e-3), approx(1e6 * work, rel=1e-3))


def test_what_is_not_faster_is_dropped():
    made, _ = tried(step(WAITS), step(WAITS))
    assert not made.kept and made.options == {"other": 1} and "dropped" in made.note


def test_a_step_that_does_not_fit_is_not_compiled_again():
    made, asked = tried(step(WAITS), step(HIDES), usable=99)
    assert not made.kept and asked == [] and "does not fit" in made.note


def test_a_compiler_that_fails_with_the_profile_leaves_the_first():
    first = step(WAITS)

    def fails(options: Any) -> Any:
        raise CompilerFailedError("XLA fails on this program")

    made = profiled(first, {"other": 1}, WIDE, 4, 120, fails)
    assert made.compiled is first and made.options == {"other": 1}
    assert made.note == "the profile of the timeline's times was dropped: with it XLA fails on this program"


def test_processes_go_by_what_the_first_of_them_says():
    """Another process, whose own step has other times and would not be worth it, takes the first's."""
    said: list[str] = []

    def first_says(make: Any) -> str:
        said.append(make())
        return said[-1]

    chief = profiled(step(WAITS), {"other": 1}, WIDE, 4, 120, lambda options: step(HIDES), first_says)
    answers = iter(said)
    second = step(WAITS)
    other = profiled(
        step(module(product("a", 500))), {"other": 1}, WIDE, 4, 120, lambda options: second, lambda make: next(answers)
    )
    assert chief.kept and other.kept and other.compiled is second
    assert (other.before_s, other.after_s, other.note) == (chief.before_s, chief.after_s, chief.note)
    assert profile(other.options) == profile(chief.options)


def test_a_step_that_waits_for_nothing_is_not_compiled_again():
    made, asked = tried(step(module(product("a", 500))), step(HIDES))
    assert not made.kept and asked == [] and "waits for next to nothing" in made.note


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"refused": "RESOURCE_EXHAUSTED"}, "refuses"),
        ({"violations": ("wrong",)}, "wrong"),
        ({"device": SimpleNamespace(total=121)}, "does not fit"),
        ({"remat": SimpleNamespace(count=2)}, "2 clones for 0"),
        ({"transfers": (copy(0.89),)}, "less hidden"),
    ],
)
def test_nothing_else_may_be_the_worse_for_it(changes, why):
    made, _ = tried(step(WAITS, transfers=(copy(0.95),)), step(HIDES, **({"transfers": (copy(0.9),)} | changes)))
    assert not made.kept and why in made.note


def test_a_step_that_the_compiler_refused_stays_refused():
    made, asked = tried(step(None, refused="RESOURCE_EXHAUSTED"), step(HIDES))
    assert not made.kept and asked == []
