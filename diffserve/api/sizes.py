"""Mapping from the requested size to a size that the model generates well, and back.

Clients hard-code 512x512 and 1024x1024, but a model works well only near its training size. Other sizes are generated
at the nearest good size of the same aspect ratio and resized. A small model may know only a few aspect ratios: the
nearest one is generated and its edges are extended, which keeps more captions correct than cropping.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.api.types import (
    Accepted,
    DiffusionParams,
    Event,
    GenerationRequest,
    ImageFinished,
    ModelInfo,
    Picture,
)
from diffserve.media.images import resize, stretch
from diffserve.models import controlnets, references
from diffserve.models.controlnets import PARAM, Control
from diffserve.models.references import MAX_EDGE_PX

MIN_SIDE_PX = 64
MAX_SIDE_PX = 2048
SAME_ASPECT = 0.02
"""Two aspect ratios count as equal if they differ by at most 2 %."""
ASPECT_WEIGHT = 8.0
"""Weight of a wrong aspect ratio relative to a wrong area, both as logarithms of ratios."""


class SizePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The size to generate (``paint_*``) and the size to deliver (``width_px``, ``height_px``).

    Attributes:
        is_trained: Whether the generated size is one that the model was trained at.
        is_padded: Whether the edges are extended if the aspect ratios differ; otherwise the image is cropped.
        first: With hires fix, the plan of the first pass; the other fields are then those of the enlarged image.
    """

    paint_width_px: int
    paint_height_px: int
    width_px: int
    height_px: int
    is_trained: bool = False
    is_padded: bool = False
    first: SizePlan | None = None

    @property
    def start_px(self) -> tuple[int, int]:
        """Width and height at which generation starts: with hires fix those of its first pass."""
        plan = self.first or self
        return plan.paint_width_px, plan.paint_height_px

    @property
    def hires_px(self) -> tuple[int, int] | None:
        """Width and height of the second pass of hires fix; ``None`` without."""
        return None if self.first is None else (self.paint_width_px, self.paint_height_px)

    @property
    def recorded_px(self) -> tuple[int, int]:
        """Width and height that infotext records as the size: with hires fix those asked for the first pass."""
        plan = self.first or self
        return plan.width_px, plan.height_px

    @property
    def warning(self) -> str | None:
        """A sentence for the caller if the image is resized, else ``None``."""
        if (self.paint_width_px, self.paint_height_px) == (self.width_px, self.height_px):
            return None
        quality = ", a size that this model was trained for," if self.is_trained else ""
        padding = "padded at its edges and " if self.is_padded else ""
        return (
            f"the image was generated at {self.paint_width_px}x{self.paint_height_px}{quality} "
            f"and {padding}resized to {self.width_px}x{self.height_px}."
        )

    def deliver(self, picture: Picture) -> Picture:
        """Resize a generated image to the delivered size."""
        return resize(picture, self.width_px, self.height_px, is_padded=self.is_padded)


def row_cost(info: ModelInfo, width_px: int, height_px: int) -> float:
    """Return the work of a UNet row of this size, relative to a row of the native size (a ratio of pixels)."""
    native_width_px, native_height_px = info.good_sizes[0]
    return width_px * height_px / (native_width_px * native_height_px)


def step_cost(
    unet_share: float, num_controls: float, *, num_references: float = 0.0, num_rows: float, row_cost: float
) -> float:
    """Return the work of one row of a step table, in UNet rows of the native size.

    Args:
        unet_share: Share of the UNet that runs: 1 for all of it, less for its shallow part; a mean for an estimate.
        num_controls: Number of ControlNets that run with it; a mean for an estimate.
        num_references: Number of reference images that it reads; a mean for an estimate.
        num_rows: UNet rows of the step: 1, or 2 with guidance, and more for a prompt of several parts; a mean for an
            estimate.
        row_cost: Work of a UNet row of the image's size, from ``row_cost``.
    """
    adapters = controlnets.WORK_SHARE * num_controls + references.WORK_SHARE * num_references
    return (unet_share + adapters) * num_rows * row_cost


def parse_size(text: str) -> tuple[int, int] | None:
    """Parse "512x768" as (width, height) in pixels, and "auto" (the native size of the model) as ``None``.

    Raises:
        InvalidRequest: The text is neither.
    """
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
    is_tiled: bool = False,
) -> SizePlan:
    """Choose the size at which the model generates an image of ``size``.

    Args:
        info: The model.
        size: (width, height); ``None``: the native size.
        min_side_px: Smallest side; the good sizes of the model are always allowed.
        max_side_px: Largest side; the good sizes of the model are always allowed.
        may_pad: Whether the edges may be extended; False if the image must fill the delivered size, as in inpainting.
        is_tiled: Whether the UNet runs on tiles, so that any size on the model's grid is generated directly.

    Raises:
        InvalidRequest: A side is out of range.
    """
    width, height = info.good_sizes[0] if size is None else size
    check(
        (width, height) in info.good_sizes or all(min_side_px <= side <= max_side_px for side in (width, height)),
        f"size is {width}x{height}; each side must lie between {min_side_px} and {max_side_px} px.",
        "size",
        "invalid_size",
    )
    pads = may_pad and info.other_aspects == "pad"
    if is_tiled:
        paint_width, paint_height = on_grid_px(info, (width, height))
    elif (width, height) in info.good_sizes or (not pads and _does_well(info, width, height)):
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
        is_padded=pads and not has_same_aspect and not is_tiled,
    )


def enlarged_px(params: DiffusionParams, width_px: int, height_px: int) -> tuple[int, int] | None:
    """Return the size that hires fix enlarges an image of this size to, before rounding to the model's grid.

    ``None`` without hires fix.

    Raises:
        InvalidRequest: ``hires_size`` is not a size.
    """
    if params.hires_size is not None:
        match = re.fullmatch(r"\s*([1-9][0-9]{0,5})\s*[xX×]\s*([1-9][0-9]{0,5})\s*", params.hires_size)
        message = f"hires_size is {params.hires_size[:40]!r}; write it as WIDTHxHEIGHT, for example 1024x1024."
        if match is None:
            raise InvalidRequest(message, param="hires_size", code="invalid_size")
        return int(match[1]), int(match[2])
    if params.hires_scale is None:
        return None
    return max(1, round(width_px * params.hires_scale)), max(1, round(height_px * params.hires_scale))


def on_grid_px(info: ModelInfo, size: tuple[float, float]) -> tuple[int, int]:
    """Return ``size`` (width, height) rounded up to the grid of the model."""
    step = info.size_multiple_px
    width, height = (max(step, math.ceil(side / step - 1e-9) * step) for side in size)
    return width, height


def plan_hires(
    info: ModelInfo,
    plan: SizePlan,
    params: DiffusionParams,
    *,
    min_side_px: int = MIN_SIDE_PX,
    max_side_px: int = MAX_SIDE_PX,
) -> SizePlan:
    """Return the plan of an image with hires fix, of which ``plan`` is the first pass; without, ``plan``.

    The second pass runs at the requested size, rounded up to the model's grid, and with the aspect ratio of the first
    pass if its edges are padded.

    Args:
        info: The model.
        plan: The plan of the first pass.
        params: The request's parameters.
        min_side_px: Smallest side.
        max_side_px: Largest side of the enlarged image.

    Raises:
        InvalidRequest: The enlarged size is out of range.
    """
    size = enlarged_px(params, plan.width_px, plan.height_px)
    if size is None:
        return plan
    width, height = size
    name = "hires_size" if params.hires_scale is None else "hires_scale"
    message = f"{name} gives {width}x{height}; each side must lie between {min_side_px} and {max_side_px} px."
    check(size in info.good_sizes or all(min_side_px <= side <= max_side_px for side in size), message, name)
    inner: tuple[float, float] = size
    if plan.is_padded:
        share = min(width / plan.paint_width_px, height / plan.paint_height_px)
        inner = plan.paint_width_px * share, plan.paint_height_px * share
    paint_width, paint_height = on_grid_px(info, inner)
    return SizePlan(
        paint_width_px=paint_width,
        paint_height_px=paint_height,
        width_px=width,
        height_px=height,
        is_padded=plan.is_padded,
        first=plan,
    )


def _does_well(info: ModelInfo, width: int, height: int) -> bool:
    """Return whether width x height is generated directly: on the grid, with an area in the range of the good ones."""
    areas = [w * h for w, h in info.good_sizes]
    on_grid = width % info.size_multiple_px == 0 and height % info.size_multiple_px == 0
    return on_grid and max(width, height) <= info.max_side_px and min(areas) <= width * height <= max(areas)


def _nearest_good(info: ModelInfo, width: int, height: int) -> tuple[int, int]:
    """Return the good size with the nearest aspect ratio, and among equal ones the nearest area."""

    def misfit(size: tuple[int, int]) -> tuple[float, float]:
        w, h = size
        return round(abs(math.log(w / h * height / width)), 6), abs(math.log(w * h / (width * height)))

    return min(info.good_sizes, key=misfit)


def _nearest(info: ModelInfo, width: int, height: int) -> tuple[int, int]:
    """Return the good size of the same aspect ratio with the nearest area.

    If there is none, return the grid size near that aspect ratio and the native area.
    """
    aspect = math.log(width / height)
    same_aspect = [(w, h) for w, h in info.good_sizes if abs(math.log(w / h) - aspect) <= SAME_ASPECT]
    if same_aspect:
        return min(same_aspect, key=lambda size: abs(math.log(size[0] * size[1] / (width * height))))
    native_area = info.good_sizes[0][0] * info.good_sizes[0][1]

    def misfit(size: tuple[int, int]) -> float:
        w, h = size
        return ASPECT_WEIGHT * abs(math.log(w / h) - aspect) + abs(math.log(w * h / native_area))

    return min([*info.good_sizes, *_grid(info, width, height)], key=misfit)


def _grid(info: ModelInfo, width: int, height: int) -> Iterator[tuple[int, int]]:
    """Yield grid sizes near the aspect ratio of width x height.

    Their areas start at half the smallest good area, their sides end at the largest side of the model.
    """
    step = info.size_multiple_px
    smallest = min(w * h for w, h in info.good_sizes) / 2
    ratio = min(width, height) / max(width, height)
    for long in range(step, info.max_side_px + 1, step):
        for short in (int(long * ratio) // step * step, (int(long * ratio) // step + 1) * step):
            if long * short >= smallest and short <= info.max_side_px:
                yield (long, short) if width >= height else (short, long)


def fit_controls(
    controls: Sequence[Control], images: Sequence[Picture], requested: tuple[int, int], generated: tuple[int, int]
) -> tuple[Picture, ...]:
    """Resize the input images of ControlNets to the generated size.

    Args:
        controls: The ControlNets; ``resize`` says how an image of another size is fitted to the requested size.
        images: One image for each of ``controls``.
        requested: The requested size (width, height).
        generated: The generated size (width, height).

    Raises:
        InvalidRequest: An image has another size and resizing is off, or has another aspect ratio without a resize mode
            for it, so that its content would be displaced.
    """
    images = tuple(_in_aspect(control, image, requested) for control, image in zip(controls, images, strict=True))
    for control, image in zip(controls, images, strict=True):
        image_size, size = f"{image.width_px}x{image.height_px}", f"{requested[0]}x{requested[1]}"
        message = f"the image of ControlNet {control.name!r} is {image_size} px, the generated image {size} px; "
        has_aspect = abs(math.log(image.width_px / image.height_px * requested[1] / requested[0])) <= SAME_ASPECT
        advice = (
            "give one of that aspect ratio: resizing keeps it." if control.resize else f"give one of {size} px, or ask "
        )
        if not control.resize:
            advice += f"for size {image_size}"
            advice += ", or set resize." if has_aspect else "."
        fits = (image_size == size or bool(control.resize)) and has_aspect
        check(fits, message + advice, PARAM, "invalid_image")
    return tuple(resize(image, *generated) for image in images)


def fit_references(images: Sequence[Picture]) -> tuple[Picture, ...]:
    """Shrink reference images whose shorter side is above ``MAX_EDGE_PX`` to that; encoders read far less."""

    def shrink(image: Picture) -> Picture:
        share = MAX_EDGE_PX / min(image.width_px, image.height_px)
        size = round(image.width_px * share), round(image.height_px * share)
        return image if share >= 1.0 else stretch(image, *size)

    return tuple(map(shrink, images))


def _in_aspect(control: Control, image: Picture, size: tuple[int, int]) -> Picture:
    """Return ``image`` at ``size`` (width, height) by the resize mode of ``control``, if it has one."""
    if control.resize == "stretch":
        return stretch(image, *size)
    return resize(image, *size, is_padded=control.resize == "fill") if control.resize in ("crop", "fill") else image


class Sized(NamedTuple):
    """A request at a size that the model generates; ``plan`` is ``None`` if that is the requested size."""

    request: GenerationRequest
    plan: SizePlan | None

    @classmethod
    def of(cls, request: GenerationRequest, info: ModelInfo) -> Sized:
        """Return ``request`` at a size that the model of ``info`` generates.

        The requested size is kept if it is on the model's grid and within its largest side, or if there is an init
        image.

        Raises:
            InvalidRequest: The size is out of range, or the image of a ControlNet does not fit.
        """
        if request.reference_images:
            request = msgspec.structs.replace(request, reference_images=fit_references(request.reference_images))
        requested, init = (request.width_px, request.height_px), request.init_image
        native = info.good_sizes[0] if init is None else (init.width_px, init.height_px)
        size = (requested[0] or native[0], requested[1] or native[1])
        longest = max(size) if request.diffusion.tile_size else info.max_side_px
        on_grid = all(side % info.size_multiple_px == 0 and side <= longest for side in size)
        if requested == (None, None) or on_grid or init is not None:
            images = fit_controls(request.diffusion.controlnets, request.control_images, size, size)
            return cls(msgspec.structs.replace(request, control_images=images) if images else request, None)
        plan = plan_size(info, size, is_tiled=bool(request.diffusion.tile_size))
        width_px, height_px = plan.paint_width_px, plan.paint_height_px
        images = fit_controls(request.diffusion.controlnets, request.control_images, size, (width_px, height_px))
        plan = plan_hires(info, plan, request.diffusion)
        changed = {"width_px": width_px, "height_px": height_px, "control_images": images, "hires_px": plan.hires_px}
        return cls(msgspec.structs.replace(request, **changed), plan)

    def deliver(self, event: Event) -> Event:
        """Return ``event`` with its image at the requested size, and with a warning if that was resized."""
        if self.plan is None or self.plan.warning is None:
            return event
        if isinstance(event, Accepted):
            return msgspec.structs.replace(event, warnings=(*event.warnings, self.plan.warning))
        if isinstance(event, ImageFinished):
            result = event.result
            delivered = msgspec.structs.replace(
                result, picture=self.plan.deliver(result.picture), warnings=(*result.warnings, self.plan.warning)
            )
            return msgspec.structs.replace(event, result=delivered)
        return event
