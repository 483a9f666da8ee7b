"""The opcodes of HLO (`xla/hlo/ir/hlo_opcode.h`, August 2026), and which of them cost nothing."""

# ruff: noqa: SIM905  (lists of words are read more easily as text)

FREE = frozenset(
    "add-dependency after-all bitcast constant domain get-dimension-size get-tuple-element opt-barrier "
    "optimization-barrier parameter partition-id replica-id tuple".split()
)
"""Names for what is there already."""

COLLECTIVES = frozenset(
    "all-gather all-reduce all-to-all collective-broadcast collective-permute ragged-all-to-all reduce-scatter".split()
)

KNOWN = (
    FREE
    | COLLECTIVES
    | frozenset(
        "abs acos acosh add and asin asinh async-done async-start async-update atan2 atanh batch-norm-grad "
        "batch-norm-inference batch-norm-training bitcast-convert broadcast call cbrt ceil cholesky clamp clz compare "
        "complex concatenate conditional convert convolution copy copy-done copy-start cosh cosine count-leading-zeros "
        "custom-call divide dot dynamic-reshape dynamic-slice dynamic-update-slice erf exponential "
        "exponential-minus-one fft floor fusion gather imag infeed iota is-finite log log-plus-one logistic map maximum "
        "minimum multiply negate not or outfeed pad popcnt power ragged-dot real recv recv-done reduce "
        "reduce-precision reduce-window remainder reshape reverse rng rng-bit-generator rng-get-and-update-state "
        "round-nearest-afz round-nearest-even rsqrt scaled-dot scan scatter select select-and-scatter send send-done "
        "set-dimension-size shift-left shift-right-arithmetic shift-right-logical sign sine sinh slice sort sqrt "
        "stochastic-convert subtract tan tanh topk transpose triangular-solve tuple while xor".split()
    )
)


def base(opcode: str) -> str:
    """The operation behind an opcode: `all-gather` for `all-gather-start`."""
    for ending in ("-start", "-update", "-done"):
        if opcode.endswith(ending):
            return opcode.removesuffix(ending)
    return opcode
