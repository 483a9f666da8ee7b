"""Memory of cuDNN's attention that a compile without a GPU does not see.

XLA asks cuDNN how much scratch memory a kernel needs when it compiles for a GPU that is there. Without one the call keeps
the empty buffer that jax gave it. The gradient kernel's can be gigabytes, so it is worked out here.
"""

import math
import re
from collections.abc import Sequence

from forebay.xla.hlo import Instruction, Module, arrays_of

_AMPERE = 8


def gradient_workspace_bytes(
    query: Sequence[int], kv_heads: int, v_head_dim: int, itemsize: int, capability: tuple[int, int]
) -> int:
    """Scratch memory of cuDNN's attention gradient.

    The queries' gradient is summed in float32, as is one number for each query and head; with fewer heads of keys than of
    queries the gradients of keys and values are first made for each head (cudnn-frontend,
    `node/scaled_dot_product_flash_attention.h`, `get_fe_workspace_size_node` and the tensors that are not virtual). On
    Ampere the kernel takes another float32 sum. `benchmarks/attention` compares it with what cuDNN says.

    Args:
        query: batch, sequence, heads and head size of the queries on one device.
        kv_heads, v_head_dim: heads of keys and values, and the values' size.
        itemsize: bytes of an element of queries, keys and values.
        capability: the GPU's compute capability.
    """
    rows, size = math.prod(query[:3]), query[3]
    summed = rows * size * 4 * (2 if capability[0] == _AMPERE else 1)
    per_head = rows * (size + v_head_dim) * itemsize if kv_heads != query[2] else 0
    return summed + rows * 4 + per_head


def missing_workspaces(module: Module, capability: tuple[int, int]) -> dict[str, int]:
    """Bytes of scratch memory of the gradient kernels in a program whose compiler did not ask for it, by instruction.

    Calls of one stream follow one another, so that they can share it.
    """
    calls = (i for body in module.computations.values() for i in body if "__cudnn$fmha" in i.rest)
    found = {i.name: _missing(module, i, capability) for i in calls}
    return {name: size for name, size in found.items() if size}


def _missing(module: Module, call: Instruction, capability: tuple[int, int]) -> int:
    if "Backward" not in call.rest or arrays_of(call.shape)[-1].num_bytes:
        return 0
    query, key, value = (arrays_of(o.shape)[0] for o in module.operands(call)[:3])
    heads = heads_dimension(call)
    batch, length, size = (query.dims[d] for d in (0, 3 - heads, 3))
    itemsize = query.num_bytes // math.prod(query.dims)
    shape = (batch, length, query.dims[heads], size)
    return gradient_workspace_bytes(shape, key.dims[heads], value.dims[3], itemsize, capability)


def heads_dimension(call: Instruction) -> int:
    """Which dimension of cuDNN's queries, keys and values counts the heads: 1, or 2 where the sequence comes before.

    On the right of the first product that the call's configuration lists are keys or, of a gradient, queries.
    """
    batch = re.search(r'"rhs_batch_dimensions":\s*\[([^\]]*)\]', call.rest)
    return 1 if batch and "1" in re.findall(r"\d+", batch[1]) else 2
