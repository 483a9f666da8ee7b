"""Fewer operations with the same decisions: what can only be repeated together is one operation."""

import dataclasses

from forebay.planner.problem import LayerProblem


def simplify(stack: LayerProblem) -> LayerProblem:
    """`stack` with operations merged into the one that alone uses their results, and free ones passed over.

    Values that are needed, named or carried stay as they are. Costs of all placements are unchanged.
    """
    fixed = set(stack.needed) | set(stack.carry) | {v for values in stack.names.values() for v in values}
    ops = dict(enumerate(stack.ops))
    changed = True
    while changed:
        changed = False
        uses: dict[int, set[int]] = {}
        for i, op in ops.items():
            for v in op.inputs:
                uses.setdefault(v, set()).add(i)
        for i in list(ops):
            op = ops[i]
            if any(v in fixed for v in op.outputs):
                continue
            users = {u for v in op.outputs for u in uses.get(v, ()) if u in ops}
            if len(users) == 1 or (op.seconds == 0 and len(users) > 1):
                for u in users:
                    user = ops[u]
                    inputs = [v for v in user.inputs if v not in op.outputs]
                    inputs += [v for v in op.inputs if v not in inputs]
                    seconds = user.seconds + (op.seconds if len(users) == 1 else 0.0)
                    ops[u] = dataclasses.replace(user, inputs=tuple(inputs), seconds=seconds)
                    for v in op.inputs:
                        uses.setdefault(v, set()).add(u)
                del ops[i]
                changed = True
    return dataclasses.replace(stack, ops=tuple(ops[i] for i in sorted(ops)))
