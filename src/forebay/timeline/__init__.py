"""When everything in a compiled step runs on a machine, and what the step waits for.

`forebay.timeline` is both this package and its one function, `forebay.timeline(program, hardware)`: importing
any module of a package makes the package's name in `forebay` the package, so that it has to be callable.
"""

import sys
import types
from typing import Any

from forebay.timeline.build import timeline
from forebay.timeline.costs import IDEAL, CostModel, Efficiency
from forebay.timeline.timeline import Exposed, Gap, Span, Timeline

__all__ = ["IDEAL", "CostModel", "Efficiency", "Exposed", "Gap", "Span", "Timeline", "timeline"]


class _Callable(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Timeline:
        return timeline(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
