"""Plans: their file, and the checks against a model."""

import dataclasses
import json
import math

import hypothesis
import hypothesis.strategies as st
import pytest

from forebay.errors import UserError
from forebay.planner.placement import Placement
from forebay.planner.plan import ModelId, Plan

STACKS = {"dense": 2, "moe": 4}
CARRIED = {"dense": ("context", "mlpwi_0"), "moe": ("context", "moe_mlpwi_0")}
MODEL = ModelId("deepseek", "0123456789ab")


def plan(*placements, **fields):
    default = (Placement("dense", (0, 2), {}), Placement("moe", (0, 4), {"context": "host"}))
    return Plan(placements or default, **fields)


def refused(make):
    with pytest.raises(UserError) as error:
        make()
    assert "\n" not in str(error.value)
    return str(error.value)


# ------------------------------------------------------------------ the file

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(st.text(), json_values, max_size=3)
ranges = st.tuples(st.integers(0, 100), st.integers(1, 100)).map(lambda r: (r[0], r[0] + r[1]))
wheres = st.sampled_from(["device", "host", "recompute"])
tensors = st.dictionaries(st.text(min_size=1).filter(lambda n: n != "*"), wheres)
plans = st.builds(
    Plan,
    placements=st.lists(st.builds(Placement, st.text(min_size=1), ranges, tensors), max_size=4).map(tuple),
    optimizer_host_fraction=st.floats(0, 1),
    parameters_host_fraction=st.floats(0, 1),
    model=st.none() | st.builds(ModelId, st.text(), st.text()),
    hardware=st.none() | st.text(),
    devices=st.none() | st.integers(1, 10**6),
    mesh=st.dictionaries(st.text(), st.integers(1, 1024), max_size=3),
    batch=st.none() | st.integers(1, 10**6),
    seq=st.none() | st.integers(1, 10**7),
    predicted=st.none() | objects,
    compiled=st.none() | objects,
    verified=st.booleans(),
    alternatives=st.lists(objects, max_size=2).map(tuple),
    reasons=st.lists(objects, max_size=2).map(tuple),
    notes=st.lists(st.text(), max_size=2).map(tuple),
)


@hypothesis.settings(max_examples=100)
@hypothesis.given(plans)
def test_a_plan_survives_its_file(tmp_path_factory, given):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    given.save(path)
    assert Plan.load(path) == given


def test_the_shape_of_the_file():
    data = plan(
        model=MODEL, hardware="gb200", devices=8, mesh={"fsdp": 8}, batch=16, seq=4096,
        predicted={"device_bytes": 1}, verified=True,
    ).to_json()  # fmt: skip
    assert json.loads(json.dumps(data)) == {
        "schema": "forebay.plan/1",
        "model": {"name": "deepseek", "fingerprint": "0123456789ab"},
        "hardware": "gb200",
        "devices": 8,
        "mesh": {"fsdp": 8},
        "batch": 16,
        "seq": 4096,
        "placements": [
            {"stack": "dense", "layers": [0, 2], "tensors": {}},
            {"stack": "moe", "layers": [0, 4], "tensors": {"context": "host"}},
        ],
        "optimizer": {"host_fraction": 0.0},
        "parameters": {"host_fraction": 0.0},
        "predicted": {"device_bytes": 1},
        "compiled": None,
        "verified": True,
        "alternatives": [],
        "reasons": [],
        "notes": [],
    }


def test_what_layers_store_to_the_host():
    kept = plan(Placement("dense", (0, 2), {"context": "device"}))
    assert not kept.stores and plan().stores
    assert not dataclasses.replace(kept, optimizer_host_fraction=1.0).stores
    assert dataclasses.replace(kept, parameters_host_fraction=0.5).stores, "gradients"


def test_a_plan_may_leave_out_all_but_its_placements():
    assert Plan.from_json({"schema": "forebay.plan/1", "placements": plan().to_json()["placements"]}) == plan()


@pytest.mark.parametrize("data", [[], "plan", None, {}, {"schema": "forebay.compile/1"}, {"schema": 1}])
def test_something_that_is_not_a_plan(data):
    assert "the file x is not a plan file" in refused(lambda: Plan.from_json(data, "the file x"))


def test_a_plan_of_another_version():
    message = refused(lambda: Plan.from_json({"schema": "forebay.plan/2", "placements": []}))
    assert "forebay.plan/2" in message
    assert "forebay.plan/1" in message


@pytest.mark.parametrize(
    "damage",
    [
        {"placements": None},
        {"placements": [{"layers": [0, 2], "tensors": {}}]},
        {"placements": [{"stack": "dense", "layers": [0], "tensors": {}}]},
        {"placements": [{"stack": "dense", "layers": ["a", "b"], "tensors": {}}]},
        {"placements": [{"stack": "dense", "layers": [0, 2], "tensors": ["context"]}]},
        {"placements": [{"stack": "dense", "layers": [0, 2], "tensors": None}]},
        {"placements": ["dense"]},
        {"optimizer": {"host_fraction": "all"}},
        {"optimizer": [1]},
        {"model": {"name": "x"}},
        {"model": "x"},
        {"mesh": 8},
        {"alternatives": 3},
    ],
    ids=str,
)
def test_a_damaged_plan_names_the_file(tmp_path, damage):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan().to_json() | damage))
    assert str(path) in refused(lambda: Plan.load(path))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"placements: []"])
def test_a_file_that_is_not_json(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert "is not JSON" in refused(lambda: Plan.load(path))


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "absent.json", tmp_path):
        assert str(path) in refused(lambda path=path: Plan.load(path))


def test_a_place_in_the_file_that_is_none():
    data = plan().to_json()
    data["placements"][0]["tensors"] = {"context": "disk"}
    assert "'disk'" in refused(lambda: Plan.from_json(data))


# ------------------------------------------------------------------ against a model


def test_a_plan_that_fits_its_model():
    given = plan(model=MODEL)
    assert given.check(STACKS, CARRIED, MODEL) is given
    assert plan().check(STACKS, CARRIED, MODEL) == plan()  # tied to no model


def test_a_plan_of_another_model():
    message = refused(lambda: plan(model=MODEL).check(STACKS, CARRIED, ModelId("deepseek", "ba9876543210")))
    assert "0123456789ab" in message
    assert "ba9876543210" in message


def test_a_tensor_that_the_stack_does_not_carry():
    given = plan(Placement("dense", (0, 2), {"moe_mlpwi_0": "host"}), Placement("moe", (0, 4), {}))
    message = refused(lambda: given.check(STACKS, CARRIED))
    assert "'moe_mlpwi_0'" in message
    assert "'dense'" in message
    assert "'moe'" not in message
    assert "did you mean 'mlpwi_0'" in message


@pytest.mark.parametrize(
    ("placements", "says"),
    [
        ([("dense", 0, 2)], "0:4 of 'moe'"),
        ([("dense", 0, 2), ("moe", 0, 3)], "3:4 of 'moe'"),
        ([("dense", 0, 2), ("moe", 0, 5)], "it has 4 layers"),
        ([("dense", 0, 2), ("moe", 0, 3), ("moe", 2, 4)], "two placements for layer 2"),
        ([("dense", 0, 2), ("moe", 0, 4), ("mor", 0, 4)], "did you mean 'moe'"),
    ],
)
def test_placements_that_do_not_cover_the_stacks(placements, says):
    given = plan(*(Placement(stack, (a, b), {}) for stack, a, b in placements))
    assert says in refused(lambda: given.check(STACKS, CARRIED))


@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_host_fractions_are_written_and_read(what):
    given = plan(**{f"{what}_host_fraction": 0.25})
    assert Plan.from_json(given.to_json()) == given
    assert given.to_json()[what] == {"host_fraction": 0.25}


@pytest.mark.parametrize("fraction", [-0.1, 1.1, math.nan, math.inf])
def test_fractions_that_are_none(fraction):
    assert "between 0 and 1" in refused(lambda: plan(optimizer_host_fraction=fraction))


def test_whether_anything_is_offloaded():
    assert plan().offloads
    assert not plan(Placement("dense", (0, 2), {"context": "device"})).offloads
    assert plan(Placement("dense", (0, 2), {}), optimizer_host_fraction=0.5).offloads


def test_for_stack_is_in_order_of_layers():
    given = plan(Placement("moe", (2, 4), {}), Placement("dense", (0, 2), {}), Placement("moe", (0, 2), {}))
    assert [p.layers for p in given.for_stack("moe")] == [(0, 2), (2, 4)]
    assert given.for_stack("absent") == ()


def test_a_plan_file_that_places_a_tensor_twice_is_refused(tmp_path):
    file = tmp_path / "plan.json"
    plan = Plan((Placement("layers", (0, 2), {"context": "host"}),))
    file.write_text(json.dumps(plan.to_json()).replace('"context": "host"', '"context": "host", "context": "device"'))
    with pytest.raises(UserError, match="gives 'context' twice"):
        Plan.load(file)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"predicted": "x"}, "predicted"),
        ({"compiled": [1]}, "compiled"),
        ({"reasons": [1]}, "reasons"),
        ({"alternatives": "none"}, "alternatives"),
        ({"devices": "many"}, "devices"),
        ({"verified": "yes"}, "verified"),
        ({"predicted": {"step_time_s": "long"}}, "predicted.step_time_s"),
        ({"placements": [{"stack": "layers", "layers": [0, 4.0], "tensors": {}}]}, "layers"),
    ],
    ids=str,
)
def test_a_value_of_another_kind_is_named(change, key):
    with pytest.raises(UserError, match=f"damaged: {key} is"):
        Plan.from_json(plan().to_json() | change)


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text("[" * 100_000)
    with pytest.raises(UserError, match="is not JSON"):
        Plan.load(file)
