"""The decision: placements, plans and the presets that MaxText users know."""

from forebay.planner.placement import PRESETS, Placement, parse_placement
from forebay.planner.plan import ModelId, Plan

__all__ = ["PRESETS", "ModelId", "Placement", "Plan", "parse_placement"]
