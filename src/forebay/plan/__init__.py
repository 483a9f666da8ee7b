"""The decision: placements, plans and the presets that MaxText users know."""

from forebay.plan.placement import PRESETS, Placement, parse_placement
from forebay.plan.plan import ModelId, Plan

__all__ = ["PRESETS", "ModelId", "Placement", "Plan", "parse_placement"]
