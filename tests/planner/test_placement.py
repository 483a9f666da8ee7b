"""The grammar of placements, the presets, and every way to get one wrong."""

import copy
import dataclasses
import itertools
import pickle

import hypothesis
import hypothesis.strategies as st
import pytest

from forebay.errors import UserError
from forebay.models.llama import model as llama
from forebay.planner.placement import PRESETS, Placement, Where, check_cover, parse_placement

LAYERS = {"layers": 4}
NAMES = {"layers": llama.ACTIVATIONS}

# DeepSeek's two kinds of layers: only one has experts
TWO = {"dense_layers": 3, "moe_layers": 58}
TWO_NAMES = {
    "dense_layers": ("decoder_layer_input", "context", "mlpwi_0"),
    "moe_layers": ("decoder_layer_input", "context", "moe_mlpwi_0"),
}


def test_a_single_layer_in_a_loop_moves_nothing():
    many = Placement("layers", (2, 4), {"h": "host", "u": "device"})
    one = Placement("layers", (3, 4), {"h": "host", "u": "device", "v": "recompute"})
    assert many.in_loop == many
    assert dict(one.in_loop.tensors) == {"h": "device", "u": "device", "v": "recompute"}
    assert one.in_loop.layers == one.layers


def parse(text, stacks=LAYERS, carried=NAMES):
    return [(p.stack, p.layers, dict(p.tensors)) for p in parse_placement(text, stacks, carried)]


def refused(text, stacks=LAYERS, carried=NAMES):
    with pytest.raises(UserError) as error:
        parse_placement(text, stacks, carried)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2
    return str(error.value)


# ------------------------------------------------------------------ presets

# MaxText 0.2.5, `get_remat_policy`: policy -> names saved, names offloaded
QKV = {"query_proj", "value_proj", "key_proj", "kv_proj", "qkv_proj"}
MAXTEXT = {
    "full": (set(), set()),
    "minimal": (QKV | {"out_proj", "mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo"}, set()),
    "minimal_with_context": (QKV | {"out_proj", "mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo", "context"}, set()),
    "save_dot_with_context_except_mlp": (QKV | {"context", "out_proj"}, set()),
    "save_dot_except_mlpwi": (QKV | {"out_proj", "mlpwo"}, set()),
    "save_dot_except_mlp": (QKV | {"out_proj"}, set()),
    "save_qkv_proj": (QKV, set()),
    "save_out_proj": ({"out_proj"}, set()),
    "qkv_proj_offloaded": (set(), QKV - {"qkv_proj"}),
    "minimal_offloaded": (set(), QKV | {"out_proj", "mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo"}),
}


@pytest.mark.parametrize("preset", MAXTEXT)
def test_presets_are_maxtexts(preset):
    saved, offloaded = MAXTEXT[preset]
    assert PRESETS[preset] == dict.fromkeys(saved, "device") | dict.fromkeys(offloaded, "host")


def test_there_is_no_preset_of_our_own_but_the_absence_of_checkpointing():
    assert set(PRESETS) - set(MAXTEXT) == {"none", "minimal_flash"}  # the latter is MaxText's older name of another
    assert PRESETS["minimal_flash"] == PRESETS["minimal_with_context"]
    assert PRESETS["none"] == {"*": "device"}


def test_a_preset_places_only_what_the_stack_carries():
    assert parse("qkv_proj_offloaded") == [
        ("layers", (0, 4), {"query_proj": "host", "key_proj": "host", "value_proj": "host"})
    ]


# ------------------------------------------------------------------ the grammar


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [((0, 4), {})]),
        ("full", [((0, 4), {})]),
        ("none", [((0, 4), {"*": "device"})]),
        ("context=host", [((0, 4), {"context": "host"})]),
        (" context = host , out_proj=device ", [((0, 4), {"context": "host", "out_proj": "device"})]),
        ("full,context=device", [((0, 4), {"context": "device"})]),
        ("save_out_proj,out_proj=recompute", [((0, 4), {"out_proj": "recompute"})]),
        ("out_proj=recompute,save_out_proj", [((0, 4), {"out_proj": "recompute"})]),
        ("none,context=host", [((0, 4), {"*": "device", "context": "host"})]),
        ("context=host@0:3;full@3:4", [((0, 3), {"context": "host"}), ((3, 4), {})]),
        ("full@3:4;context=host@0:3", [((0, 3), {"context": "host"}), ((3, 4), {})]),
        ("layers:context=host@0:4", [((0, 4), {"context": "host"})]),
        ("context=host@ 0:2 ;; full@2:4;", [((0, 2), {"context": "host"}), ((2, 4), {})]),
    ],
)
def test_the_grammar(text, expected):
    assert parse(text) == [("layers", layers, tensors) for layers, tensors in expected]


def test_without_a_stack_a_part_holds_where_the_tensor_is():
    assert parse("moe_mlpwi_0=host,context=device", TWO, TWO_NAMES) == [
        ("dense_layers", (0, 3), {"context": "device"}),
        ("moe_layers", (0, 58), {"moe_mlpwi_0": "host", "context": "device"}),
    ]


def test_a_stack_that_is_not_mentioned_is_recomputed():
    assert parse("moe_layers:context=host@0:50;moe_layers:full@50:58", TWO, TWO_NAMES) == [
        ("dense_layers", (0, 3), {}),
        ("moe_layers", (0, 50), {"context": "host"}),
        ("moe_layers", (50, 58), {}),
    ]


@hypothesis.given(
    cuts=st.sets(st.integers(1, 11)),
    where=st.lists(st.sampled_from(["device", "host", "recompute"]), min_size=12, max_size=12),
)
def test_what_is_written_is_what_is_read(cuts, where):
    edges = [0, *sorted(cuts), 12]
    ranges = [(a, b, {"context": where[a]}) for a, b in itertools.pairwise(edges)]
    text = ";".join(f"context={t['context']}@{a}:{b}" for a, b, t in ranges)
    assert parse(text, {"layers": 12}) == [("layers", (a, b), t) for a, b, t in ranges]


# ------------------------------------------------------------------ names that are not there


def test_an_unknown_tensor_names_the_closest_first():
    message = refused("hiden=host", LAYERS, {"layers": ("out_proj", "hidden", "context")})
    assert "'hiden'" in message
    assert "did you mean 'hidden'? There are: hidden, " in message
    for name in ("out_proj", "context"):
        assert name in message


def test_a_tensor_that_only_experts_have_is_refused_for_a_dense_model():
    message = refused("moe_mlpwi_0=host")
    assert "'moe_mlpwi_0'" in message
    assert "layers" in message.replace("decoder_layer_input", "")  # the stack that lacks it
    assert "did you mean 'mlpwi_0'" in message


def test_a_tensor_that_the_stack_asked_for_does_not_have():
    message = refused("dense_layers:moe_mlpwi_0=host", TWO, TWO_NAMES)
    assert "dense_layers" in message
    assert "did you mean 'mlpwi_0'" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("minimal_oflloaded", "did you mean 'minimal_offloaded'"),
        ("context=hst", "did you mean 'host'"),
        ("context=", "device, host, recompute"),
        ("layer:context=host", "did you mean 'layers'"),
        ("=host", "context"),
        ("*=host", "*=device"),
        (",", "is empty"),
        ("@0:4", "is empty"),
    ],
)
def test_other_names_that_are_not_there(text, says):
    assert says in refused(text)


# ------------------------------------------------------------------ two placements, ranges


def test_one_tensor_twice_names_both_places():
    message = refused("context=device,context=host")
    for word in ("'context'", "device", "host"):
        assert word in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("full@0:2", "2:4"),
        ("full@2:4", "0:2"),
        ("full@0:1;full@2:4", "1:2"),
        ("full@0:3;minimal@2:4", "two placements for layer 2"),
        ("full;context=host@0:4", "two placements for layer 0"),
        ("full@0:5", "it has 4 layers"),
        ("full@2:2", "2:2"),
        ("full@3:1", "3:1"),
        ("full@1", "@first:past_last"),
        ("full@-1:2", "@first:past_last"),
        ("full@a:b", "@first:past_last"),
    ],
)
def test_ranges_cover_each_layer_once(text, says):
    assert says in refused(text)


def test_a_range_needs_a_stack_where_there_are_several():
    message = refused("full@0:3", TWO, TWO_NAMES)
    assert "dense_layers, moe_layers" in message


def test_check_cover_orders_placements():
    given = (Placement("layers", (2, 4), {}), Placement("layers", (0, 2), {"context": "host"}))
    assert [p.layers for p in check_cover(given, LAYERS)] == [(0, 2), (2, 4)]


def test_a_placement_cannot_be_changed_after_it_was_made():
    tensors: dict[str, Where] = {"context": "host"}
    placement = Placement("layers", (0, 4), tensors)
    tensors["context"] = "device"
    assert placement.names("host") == ("context",)
    with pytest.raises(TypeError):
        placement.tensors["context"] = "device"  # type: ignore[index]


@pytest.mark.parametrize("layers", [(-1, 2), (2, 2), (3, 1)])
def test_a_range_that_is_none(layers):
    with pytest.raises(UserError, match="first:past_last"):
        Placement("layers", layers, {})


def test_a_place_that_is_none():
    with pytest.raises(UserError, match="did you mean 'device'"):
        Placement("layers", (0, 1), {"context": "devise"})  # type: ignore[dict-item]


def test_placements_are_values_equal_hashable_and_copied_whole():
    placement = Placement("layers", (0, 4), {"context": "host", "out_proj": "device"})
    assert hash(placement) == hash(Placement("layers", (0, 4), {"out_proj": "device", "context": "host"}))
    for copied in (copy.deepcopy(placement), pickle.loads(pickle.dumps(placement))):
        assert copied == placement
        assert hash(copied) == hash(placement)
    assert dataclasses.asdict(placement)["tensors"] == {"context": "host", "out_proj": "device"}


def test_recomputing_one_tensor_beside_everything_on_the_device_is_refused():
    # the value would be kept under no name instead, and nothing be saved
    with pytest.raises(UserError, match="'context=recompute' does nothing beside"):
        Placement("layers", (0, 4), {"*": "device", "context": "recompute"})


def test_two_presets_for_the_same_layers_are_refused():
    with pytest.raises(UserError, match="names the presets minimal and full: name one"):
        parse("minimal,full")
