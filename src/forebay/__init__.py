"""forebay: plan, prove, run and measure the host offloading of activations in JAX.

The public surface is what this module exports. Everything is imported when first used, so that
`import forebay` costs nothing but itself.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.errors import UserError
    from forebay.graph.auto_name import auto_name
    from forebay.hardware import Hardware, get_hardware
    from forebay.offload import name, scan_layers
    from forebay.offload.apply import apply
    from forebay.offload.optimizer import streamed_update
    from forebay.offload.options import compiler_options
    from forebay.pipeline import plan
    from forebay.planner import Placement, Plan
    from forebay.timeline.build import timeline
    from forebay.timeline.timeline import Timeline
    from forebay.xla.compile import CompiledStep, compile_step
    from forebay.xla.topology import compile_only_devices

__all__ = [
    "CompiledStep",
    "Hardware",
    "Placement",
    "Plan",
    "Timeline",
    "UserError",
    "apply",
    "auto_name",
    "compile_only_devices",
    "compile_step",
    "compiler_options",
    "get_hardware",
    "name",
    "plan",
    "scan_layers",
    "streamed_update",
    "timeline",
]

_HOME = {
    "CompiledStep": "forebay.xla.compile",
    "Hardware": "forebay.hardware",
    "Placement": "forebay.planner",
    "Plan": "forebay.planner",
    "Timeline": "forebay.timeline.timeline",
    "UserError": "forebay.errors",
    "apply": "forebay.offload.apply",
    "auto_name": "forebay.graph.auto_name",
    "compile_only_devices": "forebay.xla.topology",
    "compile_step": "forebay.xla.compile",
    "compiler_options": "forebay.offload.options",
    "get_hardware": "forebay.hardware",
    "name": "forebay.offload",
    "plan": "forebay.pipeline",
    "scan_layers": "forebay.offload",
    "streamed_update": "forebay.offload.optimizer",
    "timeline": "forebay.timeline.build",
}


def __getattr__(attribute: str) -> Any:
    if attribute not in _HOME:
        raise AttributeError(f"module 'forebay' has no attribute {attribute!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[attribute]), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
