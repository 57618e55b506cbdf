"""From the size somebody asks for to the size the model paints well, and back. For every door.

Clients hard-code 512x512 and 1024x1024; a model does well only near the size it was trained at. So a size that the
model does not do well is painted at the nearest it does, with the same aspect, and the picture is then resized to
exactly what was asked. A small model may know its own aspects alone: then the nearest of them is painted, and its edges
go on to the sides of another (of 36 captions at 2:1 the embedded model has 28 right so, 15 painted at 176x88, and 19
cut out of 192x128).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Accepted, Event, GenerationRequest, ModelInfo, Painted, Picture
from diffserve.media.images import resize, stretch
from diffserve.models.controlnets import PARAM, Control

MIN_SIDE_PX = 64
MAX_SIDE_PX = 2048
SAME_ASPECT = 0.02
"""Two aspects count as the same when their ratio is within 2 %."""
ASPECT_WEIGHT = 8.0
"""How much more a wrong aspect counts than a wrong area, both as logarithms of ratios."""


class SizePlan(msgspec.Struct, frozen=True, kw_only=True):
    """``paint_*``: what the engine paints; ``width_px``, ``height_px``: what the caller gets (``deliver``).

    is_trained  whether what is painted is a size that the model was trained at
    is_padded   whether the edges go on where the aspects differ; they are cropped else
    """

    paint_width_px: int
    paint_height_px: int
    width_px: int
    height_px: int
    is_trained: bool = False
    is_padded: bool = False

    @property
    def warning(self) -> str | None:
        """One sentence for the caller when the picture is resized."""
        if (self.paint_width_px, self.paint_height_px) == (self.width_px, self.height_px):
            return None
        well = ", which this model does well," if self.is_trained else ""
        sides = "padded at its edges and " if self.is_padded else ""
        return (
            f"painted at {self.paint_width_px}x{self.paint_height_px}{well} "
            f"and {sides}resized to {self.width_px}x{self.height_px}."
        )

    def deliver(self, picture: Picture) -> Picture:
        """What was painted, as the caller gets it."""
        return resize(picture, self.width_px, self.height_px, is_padded=self.is_padded)


def row_cost(info: ModelInfo, width_px: int, height_px: int) -> float:
    """Work of a UNet row of that size, in rows of the native size: pixels over pixels."""
    native_width_px, native_height_px = info.good_sizes[0]
    return width_px * height_px / (native_width_px * native_height_px)


def parse_size(text: str) -> tuple[int, int] | None:
    """ "512x768" as (width, height) in pixels; "auto" (the model's native size) as ``None``. Raises InvalidRequest."""
    if text.strip().lower() == "auto":
        return None
    match = re.fullmatch(r"\s*(\d{1,9})\s*[xX×]\s*(\d{1,9})\s*", text)
    if match is None:
        raise InvalidRequest(
            f"size is {text[:40]!r}; write it as WIDTHxHEIGHT, for example 512x512, or auto.",
            param="size",
            code="invalid_size",
        )
    return int(match[1]), int(match[2])


def plan_size(
    info: ModelInfo,
    size: tuple[int, int] | None,
    *,
    min_side_px: int = MIN_SIDE_PX,
    max_side_px: int = MAX_SIDE_PX,
    may_pad: bool = True,
) -> SizePlan:
    """Where the model of ``info`` paints a picture of ``size`` (width, height); ``None`` is its native size.

    ``may_pad``: False where what is painted has to fill all of what is delivered, as a picture that is repainted does.

    Raises InvalidRequest when a side lies outside ``min_side_px`` .. ``max_side_px``; the model's good sizes are always
    taken.
    """
    width, height = info.good_sizes[0] if size is None else size
    check(
        (width, height) in info.good_sizes or all(min_side_px <= side <= max_side_px for side in (width, height)),
        f"size is {width}x{height}; each side must lie between {min_side_px} and {max_side_px} px.",
        "size",
        "invalid_size",
    )
    pads = may_pad and info.other_aspects == "pad"
    if (width, height) in info.good_sizes or (not pads and _does_well(info, width, height)):
        paint_width, paint_height = width, height
    else:
        paint_width, paint_height = (_nearest_good if pads else _nearest)(info, width, height)
    has_same_aspect = abs(math.log(paint_width / paint_height * height / width)) <= SAME_ASPECT
    return SizePlan(
        paint_width_px=paint_width,
        paint_height_px=paint_height,
        width_px=width,
        height_px=height,
        is_trained=(paint_width, paint_height) in info.good_sizes,
        is_padded=pads and not has_same_aspect,
    )


def _does_well(info: ModelInfo, width: int, height: int) -> bool:
    """Whether width x height is painted as it is: on the grid with an area between the good ones'."""
    areas = [w * h for w, h in info.good_sizes]
    on_grid = width % info.size_multiple_px == 0 and height % info.size_multiple_px == 0
    return on_grid and max(width, height) <= info.max_side_px and min(areas) <= width * height <= max(areas)


def _nearest_good(info: ModelInfo, width: int, height: int) -> tuple[int, int]:
    """The good size nearest in aspect, and among several of one aspect nearest in area."""

    def misfit(size: tuple[int, int]) -> tuple[float, float]:
        w, h = size
        return round(abs(math.log(w / h * height / width)), 6), abs(math.log(w * h / (width * height)))

    return min(info.good_sizes, key=misfit)


def _nearest(info: ModelInfo, width: int, height: int) -> tuple[int, int]:
    """The good size of the same aspect nearest in area, else the grid size of that aspect at the native area."""
    aspect = math.log(width / height)
    same = [(w, h) for w, h in info.good_sizes if abs(math.log(w / h) - aspect) <= SAME_ASPECT]
    if same:
        return min(same, key=lambda size: abs(math.log(size[0] * size[1] / (width * height))))
    native_area = info.good_sizes[0][0] * info.good_sizes[0][1]

    def misfit(size: tuple[int, int]) -> float:
        w, h = size
        return ASPECT_WEIGHT * abs(math.log(w / h) - aspect) + abs(math.log(w * h / native_area))

    return min([*info.good_sizes, *_grid(info, width, height)], key=misfit)


def _grid(info: ModelInfo, width: int, height: int) -> Iterator[tuple[int, int]]:
    """Grid sizes next to the aspect of width x height, from half the smallest good area up to the longest side."""
    step = info.size_multiple_px
    smallest = min(w * h for w, h in info.good_sizes) / 2
    ratio = min(width, height) / max(width, height)
    for long in range(step, info.max_side_px + 1, step):
        for short in (int(long * ratio) // step * step, (int(long * ratio) // step + 1) * step):
            if long * short >= smallest and short <= info.max_side_px:
                yield (long, short) if width >= height else (short, long)


def fit_controls(
    controls: Sequence[Control], images: Sequence[Picture], asked: tuple[int, int], painted: tuple[int, int]
) -> tuple[Picture, ...]:
    """Return the pictures of ``controls`` at the size that is ``painted`` (width, height).

    Each is first brought to the size that was ``asked`` for, as its control says.

    Raises:
        InvalidRequest: a picture has another size and is not to be resized, or another aspect and no way is given to
            resize it: what it shows would lie elsewhere.
    """
    images = tuple(_in_aspect(control, image, asked) for control, image in zip(controls, images, strict=True))
    for control, image in zip(controls, images, strict=True):
        own, size = f"{image.width_px}x{image.height_px}", f"{asked[0]}x{asked[1]}"
        said = f"the image of ControlNet {control.name!r} is {own} px, the picture {size} px; "
        has_aspect = abs(math.log(image.width_px / image.height_px * asked[1] / asked[0])) <= SAME_ASPECT
        way_out = "give one of that aspect: resizing keeps it." if control.resize else f"give one of {size} px, or ask "
        if not control.resize:
            way_out += f"for size {own}, or for it to be resized (resize)." if has_aspect else f"for size {own}."
        check((own == size or control.resize) and has_aspect, said + way_out, PARAM, "invalid_image")
    return tuple(resize(image, *painted) for image in images)


def _in_aspect(control: Control, image: Picture, size: tuple[int, int]) -> Picture:
    """Return ``image`` at ``size`` (width, height), by the resize mode of ``control`` where it has one."""
    if control.resize == "stretch":
        return stretch(image, *size)
    return resize(image, *size, is_padded=control.resize == "fill") if control.resize in ("crop", "fill") else image


class Sized(NamedTuple):
    """A request at a size that the model paints; ``plan`` is None where that is the size that was asked for."""

    request: GenerationRequest
    plan: SizePlan | None

    @classmethod
    def of(cls, request: GenerationRequest, info: ModelInfo) -> Sized:
        """A size on the model's grid and within its longest side is painted as it is, and so is one that goes with a
        picture to start from; pictures for ControlNets are of it, or brought to it. Raises InvalidRequest for a size
        that no door takes."""
        asked, init = (request.width_px, request.height_px), request.init_image
        native = info.good_sizes[0] if init is None else (init.width_px, init.height_px)
        size = (asked[0] or native[0], asked[1] or native[1])
        on_grid = all(side % info.size_multiple_px == 0 and side <= info.max_side_px for side in size)
        if asked == (None, None) or on_grid or init is not None:
            images = fit_controls(request.diffusion.controlnets, request.control_images, size, size)
            return cls(msgspec.structs.replace(request, control_images=images) if images else request, None)
        plan = plan_size(info, size)
        width_px, height_px = plan.paint_width_px, plan.paint_height_px
        images = fit_controls(request.diffusion.controlnets, request.control_images, size, (width_px, height_px))
        changed = {"width_px": width_px, "height_px": height_px, "control_images": images}
        return cls(msgspec.structs.replace(request, **changed), plan)

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
