"""The matrix and attention arithmetic of a compiled program, counted from its HLO.

XLA gives no cost analysis for a GPU that is not there, so the FLOPs (a multiplication and an addition
are two) of matrix products, convolutions (a TPU's matrix products) and fused attention are counted
from shapes. Elementwise work is not counted.
"""

import functools
import math
import re
from collections.abc import Iterator

from forebay.xla.fused_attention import heads_dimension
from forebay.xla.hlo import Array, Instruction, Module, arrays_of

_CALLS = ("calls", "to_apply", "called_computations", "true_computation", "false_computation")
# Products of length x length x head size that fused attention makes, of the keys' size and of the values': forward
# Q K^T and P V; backward Q K^T again, dS K and dS^T Q, dO V^T and P^T dO (arXiv:2205.14135, appendix B).
_CUDNN_PRODUCTS = {False: (1, 1), True: (3, 2)}
# jax's TPU kernel makes the gradients in two passes, each of which needs Q K^T and dO V^T
# (jax/experimental/pallas/ops/tpu/splash_attention); its mask is not in the HLO and taken to be causal.
_SPLASH_PRODUCTS = {"fwd": (1, 1), "dkv": (2, 2), "dq": (2, 1)}


class FlopCounter:
    """FLOPs of the instructions of one module, each computation counted once."""

    def __init__(self, module: Module):
        self._module = module
        self._computations: dict[str, float] = {}

    def computation(self, name: str) -> float:
        """FLOPs of running a computation once."""
        if name not in self._computations:
            self._computations[name] = 0.0  # HLO has no recursion
            self._computations[name] = sum(map(self.instruction, self._module.computations.get(name, ())))
        return self._computations[name]

    def instruction(self, instruction: Instruction) -> float:
        """FLOPs of one instruction and all that it calls; a loop's are those of all of its iterations.

        The end of an asynchronous operation costs nothing, its start all. A loop whose trip count the
        compiler does not know is counted as one iteration, of a conditional the dearest branch.
        """
        opcode = instruction.opcode
        if opcode.endswith(("-done", "-update")):
            return 0.0
        if opcode == "dot":
            return self._dot(instruction)
        if opcode == "ragged-dot":
            return self._ragged_dot(instruction)
        if opcode == "convolution":
            return self._convolution(instruction)
        if opcode.startswith("custom-call"):
            return self._custom_call(instruction)
        if opcode == "while":
            return (self._module.trip_count(instruction) or 1) * self.computation(instruction.called("body") or "")
        if opcode == "conditional":
            return max(map(self.computation, called(instruction)), default=0.0)
        if opcode.startswith(("fusion", "call", "async")):
            return sum(map(self.computation, called(instruction)))
        return 0.0

    def products(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions with FLOPs of their own among `instruction` and all that it calls, once each."""
        if not self.instruction(instruction):
            return
        inside = [i for name in called(instruction) for i in self._module.computations.get(name, ())]
        for i in inside:
            yield from self.products(i)
        if not inside:
            yield instruction

    def operand_dtype(self, product: Instruction) -> str:
        """The dtype, in HLO's words, of what a product multiplies: that of its first operand of floats."""
        dtypes = [a.dtype for a in self._operand_arrays(product) if a.dtype[0] in "bf"]
        return dtypes[0] if dtypes else ""

    def _operand_arrays(self, instruction: Instruction) -> list[Array]:
        """The arrays of the operands, the first of each where an operand is a tuple."""
        return [a for o in self._module.operands(instruction) for a in arrays_of(o.shape)[:1]]

    def _dot(self, instruction: Instruction) -> float:
        left = self._operand_arrays(instruction)[0].dims
        contracted = math.prod(left[d] for d in _integers(instruction, "lhs_contracting_dims"))
        return 2.0 * math.prod(arrays_of(instruction.shape)[0].dims) * contracted

    def _ragged_dot(self, instruction: Instruction) -> float:
        """Every row is in one group, whatever the groups' sizes; where rows are what is summed over, one product
        per group of the rows that it can expect: all of them over the number of groups."""
        left = self._operand_arrays(instruction)[0].dims
        summed = _integers(instruction, "lhs_contracting_dims")
        output = arrays_of(instruction.shape)[0].dims
        flops = 2.0 * math.prod(output) * math.prod(left[d] for d in summed)
        return flops / output[0] if set(summed) & set(_integers(instruction, "lhs_ragged_dims")) else flops

    def _convolution(self, instruction: Instruction) -> float:
        left, right = (a.dims for a in self._operand_arrays(instruction)[:2])
        return convolution_flops(instruction.rest, left, right, arrays_of(instruction.shape)[0].dims)

    def _custom_call(self, instruction: Instruction) -> float:
        target = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
        name = target[1] if target else ""
        if name.startswith(("__cublas$", "__triton$dot")):
            left = self._operand_arrays(instruction)[0].dims
            dims = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', instruction.rest)
            contracted = math.prod(left[int(d)] for d in re.findall(r"\d+", dims[1])) if dims else left[-1]
            return 2.0 * math.prod(arrays_of(instruction.shape)[0].dims) * contracted
        if name.startswith("__cudnn$fmha"):
            products = _CUDNN_PRODUCTS["Backward" in name]
            return self._attention(instruction, products, causal="CAUSAL" in instruction.rest)
        if name.startswith("__cudnn$conv"):
            return self._convolution(instruction)
        if splash := re.search(r"splash_m[hq]a_(fwd|dkv|dq)", instruction.name):
            return self._attention(instruction, _SPLASH_PRODUCTS[splash[1]], causal=True)
        if re.search(r"/grouped_(into|out_of|outer)/pallas_call", instruction.rest):
            # forebay.ops.moe.triton: as if all rows of the buffer were of some group, which is the most they can be
            left = self._operand_arrays(instruction)[0].dims
            return 2.0 * math.prod(left) * arrays_of(instruction.shape)[0].dims[-1]
        # Pallas kernels say themselves what they cost, where their author did
        stated = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', instruction.rest)
        return float(stated[1]) if stated else 0.0

    def _attention(self, instruction: Instruction, products: tuple[int, int], causal: bool) -> float:
        """Fused attention, from the shapes of query, key and value, its first operands of more than two dimensions.

        They are (heads, length, head size), or that and a batch in the order that the call's configuration gives.
        """
        found = [a.dims for a in self._operand_arrays(instruction) if len(a.dims) > 2 and a.dtype[0] in "bf"]
        query, key, value = found[:3]
        length = 3 - heads_dimension(instruction) if len(query) == 4 else 1
        sizes = products[0] * query[-1] + products[1] * value[-1]
        return (0.5 if causal else 1.0) * 2.0 * math.prod(query[:-1]) * key[length] * sizes


def is_attention(instruction: Instruction) -> bool:
    """Whether it is a fused attention kernel, forward or backward."""
    return "__cudnn$fmha" in instruction.rest or bool(re.search(r"splash_m[hq]a_(fwd|dkv|dq)", instruction.name))


def convolution_flops(attributes: str, left: tuple[int, ...], right: tuple[int, ...], output: tuple[int, ...]) -> float:
    """FLOPs of a convolution, counting only products with values that are there (not padding or dilation holes).

    That makes it exact for matrix products that a compiler writes as convolutions, batch dimensions
    included (the same count as in XLA's `HloCostAnalysis::HandleConvolution`).
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if labels is None:
        return 0.0
    left_labels, right_labels, output_labels = labels.groups()
    window = {
        key: value.split("x")
        for key, value in re.findall(r"(size|stride|pad|lhs_dilate|rhs_dilate)=([\dx_\-]+)", attributes)
    }
    positions = 1.0
    for n in range(sum(label.isdigit() for label in output_labels)):
        low = int(window["pad"][n].split("_")[0]) if "pad" in window else 0
        stride, dilate_left, dilate_right = (
            int(window[key][n]) if key in window else 1 for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        positions *= _valid_positions(
            left[left_labels.index(str(n))], right[right_labels.index(str(n))], output[output_labels.index(str(n))],
            low, stride, dilate_left, dilate_right,
        )  # fmt: skip
    batch_groups = re.search(r"batch_group_count=(\d+)", attributes)
    batch = left[left_labels.index("b")] / (int(batch_groups[1]) if batch_groups else 1)
    # the kernel's input features are those of one feature group
    return 2.0 * batch * right[right_labels.index("i")] * right[right_labels.index("o")] * positions


@functools.cache
def _valid_positions(
    left: int, kernel: int, output: int, low: int, stride: int, dilate_left: int, dilate_right: int
) -> int:
    """How many pairs of an output and a kernel position meet a value of the left side in one dimension."""
    count = 0
    for k in range(kernel):
        # position in the dilated left side: o * stride + shift
        shift = k * dilate_right - low
        if dilate_left == 1:
            first = max(0, -(shift // stride) if shift < 0 else 0)
            last = min(output - 1, (left - 1 - shift) // stride)
            count += max(0, last - first + 1)
        else:
            places = (o * stride + shift for o in range(output))
            count += sum(0 <= p < (left - 1) * dilate_left + 1 and p % dilate_left == 0 for p in places)
    return count


def called(instruction: Instruction, *attributes: str) -> list[str]:
    """The computations that an instruction runs once: those of `attributes`, or of all that name any."""
    if not attributes and instruction.opcode.startswith(("fusion", "async")):
        attributes = ("calls",)
    found = [name for attribute in attributes or _CALLS if (name := instruction.called(attribute))]
    for attribute in () if attributes else ("branch_computations", "called_computations"):
        listed = re.search(rf"\b{attribute}=\{{([^}}]*)\}}", instruction.rest)
        found += re.findall(r"%?([\w.\-]+)", listed[1]) if listed else []
    return list(dict.fromkeys(found))


def _integers(instruction: Instruction, attribute: str) -> list[int]:
    match = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", instruction.rest)
    return [int(d) for d in match[1].split(",") if d] if match else []
