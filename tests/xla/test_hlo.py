"""The HLO reader, on text written by hand."""

from forebay.xla.hlo import Array, arrays_of, parse_module

TEXT = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%cond (p: (s32[], f32[4])) -> pred[] {
  %p = (s32[], /*index=1*/f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(7)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (q: (s32[], f32[4])) -> (s32[], f32[4]) {
  %q = (s32[], /*index=1*/f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%q), index=1, metadata={op_name="jit(step)/while/body/save:layers:mlp\\"x"}
  ROOT %t = (s32[], f32[4]{0}) tuple(%i.1, %x)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0), metadata={op_name="state.weights"}
  %init = (s32[], f32[4]{0}) tuple(%zero, %a)
  %loop = (s32[], f32[4]{0}) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %out = f32[4]{0} get-tuple-element(%loop), index=1
}
"""


def test_computations_instructions_and_entry():
    module = parse_module(TEXT)
    assert module.scheduled
    assert module.entry == "main"
    assert [i.name for i in module.computations["body"]] == ["q", "x", "t"]
    assert [i.opcode for i in module.computations["main"]] == ["parameter", "tuple", "while", "get-tuple-element"]


def test_loops_name_their_computations_and_trip_count():
    loop = next(i for i in parse_module(TEXT).instructions() if i.opcode == "while")
    assert (loop.called("condition"), loop.called("body"), parse_module(TEXT).trip_count(loop)) == ("cond", "body", 7)


def test_parameters_roots_and_op_names():
    module = parse_module(TEXT)
    parameter, root = module.parameter("main", 0), module.root("body")
    assert parameter is not None and parameter.op_name == "state.weights"
    assert root is not None and root.name == "t"
    assert module.parameter("main", 1) is None


def test_shapes_have_dtype_dimensions_memory_space_and_bytes():
    arrays = arrays_of("(bf16[32,1,4096]{2,1,0:S(5)}, /*index=1*/pred[], f32[8,128]{1,0:T(8,128)}, s4[10]{0:E(4)})")
    assert arrays == [
        Array("bf16", (32, 1, 4096), 5),
        Array("pred", (), 0),
        Array("f32", (8, 128), 0),
        Array("s4", (10,), 0),
    ]
    assert [a.num_bytes for a in arrays] == [32 * 4096 * 2, 1, 8 * 128 * 4, 5]


def test_text_that_is_no_hlo_is_an_empty_module():
    module = parse_module("nothing here\nat all {\n")
    assert module.entry == "" and not module.scheduled
    assert list(module.instructions()) == []


def test_operands_with_and_without_percent_signs_and_shapes():
    lines = {
        "%a = f32[4]{0} add(%x, %y.1), metadata={}": ("x", "y.1"),
        "a = f32[4]{0} add(x, y.1)": ("x", "y.1"),
        "a = f32[4]{0} add(f32[4]{0} x, f32[4,2]{1,0} y.1)": ("x", "y.1"),
        "%a = f32[4]{0} add(f32[4]{0} %x, (f32[4], s32[]) %y.1)": ("x", "y.1"),
        "%a = (f32[4]{0}) tuple(%x, /*index=1*/%y)": ("x", "y"),
        "a = s32[] constant(7)": (),
        "a = f32[4]{0} parameter(0)": (),
        "a = f32[4]{0} iota(), iota_dimension=0": (),
    }
    for line, names in lines.items():
        module = parse_module(f"HloModule m\n\nENTRY %e (p: f32[]) -> f32[] {{\n  ROOT {line}\n}}\n")
        root = module.root("e")
        assert root is not None and root.operands == names, line
