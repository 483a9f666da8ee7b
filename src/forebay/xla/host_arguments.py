"""Arguments and results in host memory, for compile-only devices that list no memories.

jax drops the memory kind of a sharding over such devices (CUDA, jax 0.12.0.1), and the compiler would take the
argument for device memory. Its mark in the lowered module is put back here.
"""

import itertools
from collections.abc import Sequence
from typing import Any

_MARK = "mhlo.memory_kind"


def mark_host(lowered: Any, arguments: Sequence[bool], results: Sequence[bool]) -> None:
    """Marks arguments and results of a `jax.stages.Lowered` that are in pinned host memory, all others as on the device.

    Results beyond those described are on the device. Does nothing where jax marked any itself.

    Raises:
        ValueError: the module has another number of arguments, or fewer results.
    """
    if not any(arguments) and not any(results):
        return
    from jax.extend.mlir import ir

    module = lowered.compiler_ir()
    main = next(op for op in module.body.operations if "sym_name" in op.attributes and op.sym_name.value == "main")
    with module.context:
        marked = any(_MARK in _names(a) for a in main.attributes["arg_attrs"])
        if marked:
            return
        for key, flags in (("arg_attrs", arguments), ("res_attrs", results)):
            attributes = list(main.attributes[key])
            if len(attributes) != len(flags) and (key == "arg_attrs" or len(attributes) < len(flags)):
                raise ValueError(f"the module has {len(attributes)} {key} and {len(flags)} were described")
            new = []
            for attribute, host in zip(attributes, itertools.chain(flags, itertools.repeat(False)), strict=False):
                named = {n.name: n.attr for n in attribute}
                named[_MARK] = ir.StringAttr.get("pinned_host" if host else "device")
                new.append(ir.DictAttr.get(named))
            main.attributes[key] = ir.ArrayAttr.get(new)


def _names(attribute: Any) -> set[str]:
    return {n.name for n in attribute}
