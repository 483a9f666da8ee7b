"""The working memory of a layer under a placement: its real backward pass, traced and laid out in time."""

from collections.abc import Callable
from typing import Any

import jax

from forebay.graph.block import BlockGraph, block_graph
from forebay.graph.liveness import peak_bytes
from forebay.graph.rewrite import as_function


def working_bytes(block: BlockGraph, policy: Callable[..., Any] | None) -> int:
    """The most that one layer has on a device besides what is stored and what is copied, in bytes.

    `policy` is its `jax.checkpoint` policy; None keeps every residual.
    """
    body = as_function(block.stack.body)
    if policy is not None:
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    inputs = [block.forward.specs[v] for v in block.forward.flat.inputs]
    graph = block_graph(block.stack, inputs, block.axis_sizes, block.differentiated, body=body)
    return max(peak_bytes(graph.forward), peak_bytes(graph.backward))
