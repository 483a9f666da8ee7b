"""FLOPs counted from HLO, against products written out by hand."""

import pytest

from forebay.xla.flops import FlopCounter, convolution_flops
from forebay.xla.hlo import parse_module


def flops(*lines: str, computations: str = "") -> float:
    body = "\n".join(f"  {line}" for line in lines)
    module = parse_module(f"HloModule m, is_scheduled=true\n\n{computations}\nENTRY %main () -> f32[] {{\n{body}\n}}\n")
    return FlopCounter(module).computation("main")


A = "%a = bf16[8,16]{1,0} parameter(0)"
B = "%b = bf16[16,32]{1,0} parameter(1)"
PRODUCT = 2 * 8 * 16 * 32


def test_a_matrix_product():
    assert (
        flops(A, B, "%d = bf16[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}") == PRODUCT
    )


def test_a_batched_product_that_contracts_two_dimensions():
    assert (
        flops(
            "%a = bf16[3,8,4,5]{3,2,1,0} parameter(0)",
            "%b = bf16[3,4,5,7]{3,2,1,0} parameter(1)",
            "%d = f32[3,8,7]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2,3}, rhs_batch_dims={0}, "
            "rhs_contracting_dims={1,2}",
        )
        == 2 * 3 * 8 * 7 * 4 * 5
    )


def test_a_cublas_call_with_its_workspace():
    call = (
        '%g = (bf16[8,32]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]}}}'
    )
    assert flops(A, B, call) == PRODUCT


FUSED = """\
%inner (p0: bf16[8,16], p1: bf16[16,32]) -> bf16[8,32] {
  %p0 = bf16[8,16]{1,0} parameter(0)
  %p1 = bf16[16,32]{1,0} parameter(1)
  ROOT %dot = bf16[8,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%condition (s: (s32[], bf16[8,16], bf16[16,32])) -> pred[] {
  %s = (s32[], bf16[8,16]{1,0}, bf16[16,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %limit = s32[] constant(9)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%body (t: (s32[], bf16[8,16], bf16[16,32])) -> (s32[], bf16[8,16], bf16[16,32]) {
  %t = (s32[], bf16[8,16]{1,0}, bf16[16,32]{1,0}) parameter(0)
  %k = s32[] get-tuple-element(%t), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%k, %two)
  %x = bf16[8,16]{1,0} get-tuple-element(%t), index=1
  %y = bf16[16,32]{1,0} get-tuple-element(%t), index=2
  %f = bf16[8,32]{1,0} fusion(%x, %y), kind=kCustom, calls=%inner
  ROOT %out = (s32[], bf16[8,16]{1,0}, bf16[16,32]{1,0}) tuple(%next, %x, %y)
}
"""


def test_a_loop_runs_its_fusion_as_often_as_its_counter_says():
    start = "%start = s32[] constant(0)"
    state = "%state = (s32[], bf16[8,16]{1,0}, bf16[16,32]{1,0}) tuple(%start, %a, %b)"
    loop = "%loop = (s32[], bf16[8,16]{1,0}, bf16[16,32]{1,0}) while(%state), condition=%condition, body=%body"
    # 0, 2, 4, 6, 8
    assert flops(A, B, start, state, loop, computations=FUSED) == 5 * PRODUCT
    noted = loop + ', backend_config={"known_trip_count":{"n":"7"}}'
    assert flops(A, B, start, state, noted, computations=FUSED) == 7 * PRODUCT


def test_an_asynchronous_product_counts_at_its_start():
    start = "%s = ((bf16[8,16]{1,0}, bf16[16,32]{1,0}), bf16[8,32]{1,0}, u32[]) async-start(%a, %b), calls=%inner"
    assert flops(A, B, start, "%e = bf16[8,32]{1,0} async-done(%s), calls=%inner", computations=FUSED) == PRODUCT


@pytest.mark.parametrize(("mask", "share"), [("NO_MASK", 1), ("CAUSAL", 0.5)])
@pytest.mark.parametrize(
    ("target", "dtype", "of_keys", "of_values"),
    [("fmhaSoftmax", "bf16", 1, 1), ("fmhaSoftmaxBackward", "bf16", 3, 2), ("fmhaSoftmaxF8", "f8e4m3fn", 1, 1)],
)
def test_cudnn_attention(mask, share, target, dtype, of_keys, of_values):
    batch, length, heads, dim, value_dim, key_length = 2, 64, 4, 24, 16, 128
    query, key = f"{dtype}[{batch},{length},{heads},{dim}]", f"{dtype}[{batch},{key_length},2,{dim}]"
    value = f"{dtype}[{batch},{key_length},2,{value_dim}]"
    call = (
        f'%c = ({query}, u8[0]{{0}}) custom-call(%q, %k, %v), custom_call_target="__cudnn${target}", backend_config='
        f'{{"cudnn_fmha_backend_config":{{"mask_type":"{mask}","bmm1_dot_dimension_numbers":{{"lhs_contracting_dimensions":'
        '["3"],"lhs_batch_dimensions":["0","2"]}}}'
    )
    operands = (f"%q = {query} parameter(0)", f"%k = {key} parameter(1)", f"%v = {value} parameter(2)")
    product = 2 * batch * heads * length * key_length
    assert flops(*operands, call) == share * product * (of_keys * dim + of_values * value_dim)


@pytest.mark.parametrize(
    ("kernel", "of_keys", "of_values"),
    [("fwd_residuals", 1, 1), ("dkv_no_residuals", 2, 2), ("dq_no_residuals", 2, 1)],
)
def test_tpu_splash_attention_is_causal(kernel, of_keys, of_values):
    call = f'%splash_mha_{kernel}.1 = bf16[4,64,8] custom-call(%m, %q, %k, %v), custom_call_target="tpu_custom_call"'
    operands = (
        "%m = s8[1,4,4] parameter(0)", "%q = bf16[4,64,24] parameter(1)", "%k = bf16[2,64,24] parameter(2)",
        "%v = bf16[2,64,8] parameter(3)",
    )  # fmt: skip
    assert flops(*operands, call) == 2 * 4 * 64 * 64 / 2 * (of_keys * 24 + of_values * 8)


# A TPU's compiler writes products as convolutions; the sizes in windows are batch or contracted dimensions.


@pytest.mark.parametrize(
    ("kernel", "operands", "result"),
    [
        ("into", ("bf16[96,16]{1,0}", "bf16[16,4,32]{2,1,0}"), "bf16[96,32]{1,0}"),
        ("out_of", ("bf16[96,32]{1,0}", "bf16[16,4,32]{2,1,0}"), "bf16[96,16]{1,0}"),
        ("outer", ("bf16[96,16]{1,0}", "bf16[96,32]{1,0}"), "bf16[16,4,32]{2,1,0}"),
    ],
)
def test_grouped_products_count_every_row_once(kernel, operands, result):
    call = (
        f'%k = {result} custom-call(%a, %b), custom_call_target="__gpu$xla.gpu.triton", '
        f'metadata={{op_name="jit(step)/shard_map/grouped_{kernel}/pallas_call"}}'
    )
    a, b = operands
    assert flops(f"%a = {a} parameter(0)", f"%b = {b} parameter(1)", call) == 2 * 96 * 16 * 32


def test_a_product_as_a_convolution_without_a_window():
    assert convolution_flops("dim_labels=bf_io->bf", (8, 16), (16, 32), (8, 32)) == PRODUCT


def test_a_contracted_dimension_in_the_window():
    assert (
        convolution_flops("window={size=2}, dim_labels=b0f_0io->bf0", (8, 2, 16), (2, 16, 32), (8, 32, 1))
        == 2 * PRODUCT
    )


def test_an_output_dimension_made_by_padding_costs_only_what_is_there():
    # 4 heads of the output, each met by one position of the kernel
    attributes = "window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=b0f_0io->b0f"
    assert convolution_flops(attributes, (8, 1, 16), (4, 16, 32), (8, 4, 32)) == 4 * PRODUCT


def test_a_batch_dimension_made_by_dilation():
    # 5 batches: stride 4 over a left side dilated by 5, of which each output position meets one value
    attributes = "window={size=5 stride=4 lhs_dilate=5}, dim_labels=0bf_0io->0bf"
    assert convolution_flops(attributes, (5, 8, 16), (5, 16, 32), (5, 8, 32)) == 5 * PRODUCT
