"""Any size for whoever calls the engine from Python, as the HTTP door takes it: planned, painted, and resized."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from diffserve.sizes import SizePlan, plan_size
from diffserve.types import Accepted, Event, GenerationRequest, ModelInfo, Painted


class Sized(NamedTuple):
    """A request at a size that the model paints; ``plan`` is None where that is the size that was asked for."""

    request: GenerationRequest
    plan: SizePlan | None

    @classmethod
    def of(cls, request: GenerationRequest, info: ModelInfo) -> Sized:
        """A size on the model's grid and within its longest side is painted as it is, and so is one that goes with a
        picture to start from. Raises InvalidRequest for a size that no door takes."""
        asked = (request.width_px, request.height_px)
        native = info.good_sizes[0]
        size = (asked[0] or native[0], asked[1] or native[1])
        on_grid = all(side % info.size_multiple_px == 0 and side <= info.max_side_px for side in size)
        if asked == (None, None) or on_grid or request.init_image is not None:
            return cls(request, None)
        plan = plan_size(info, size)
        painted = msgspec.structs.replace(request, width_px=plan.paint_width_px, height_px=plan.paint_height_px)
        return cls(painted, plan)

    def deliver(self, event: Event) -> Event:
        """``event`` with the picture at the size that was asked for, and a warning that it was painted at another."""
        if self.plan is None or self.plan.warning is None:
            return event
        if isinstance(event, Accepted):
            return msgspec.structs.replace(event, warnings=(*event.warnings, self.plan.warning))
        if isinstance(event, Painted):
            result = event.result
            told = msgspec.structs.replace(
                result, picture=self.plan.deliver(result.picture), warnings=(*result.warnings, self.plan.warning)
            )
            return msgspec.structs.replace(event, result=told)
        return event
