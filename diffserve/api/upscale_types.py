"""Types of upscaling by a network, and limits on picture sizes. This module does not import torch."""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from diffserve.api.bounds import check, check_chars
from diffserve.api.types import (
    Asks,
    Cancelled,
    Failed,
    Picture,
    Priority,
    RequestEvent,
    check_scheduling,
    new_request_id,
)
from diffserve.models.model_files import MAX_NAME_CHARS

MAX_INPUT_PIXELS: Final = 4096 * 1024
MAX_OUTPUT_PIXELS: Final = 4096 * 4096
"""Largest upscaled image, before and after it is resized to the requested size."""

MAX_FACTOR: Final = 16.0
PIXELS_PER_ROW: Final = 16_384
"""Pixels of an image whose upscaling counts as a UNet row in the limits of the queue."""


class UpscaleRequest(
    msgspec.Struct, Asks["UpscaleEvent"], frozen=True, kw_only=True, forbid_unknown_fields=True, tag="upscale"
):
    """A request to enlarge an image by the network of an upscaler, by the factor that the network has.

    Attributes:
        image: The image, RGB.
        upscaler: Name of a file, see ``models.upscalers.UpscalerFolders``.
        deadline_s: Seconds after submit at which the request is abandoned.
        priority: "batch" gets what interactive requests leave.

    Raises:
        InvalidRequest: A field is wrong; ``param`` names it.
    """

    image: Picture
    upscaler: str
    deadline_s: float | None = None
    priority: Priority = "interactive"
    request_id: str = msgspec.field(default_factory=partial(new_request_id, "ups"))

    def __post_init__(self) -> None:
        check_chars(self.upscaler, MAX_NAME_CHARS, "upscaler")
        check(self.image.channels == 3, "the image to upscale is not RGB; give an RGB image.", "image")
        check_input_size(self.image.width_px, self.image.height_px)
        check_scheduling(self.deadline_s, self.priority)

    @property
    def model(self) -> str:
        """Name of the image model, for queues: no model is needed, the device is that of the first one."""
        return ""


class Upscaled(RequestEvent, frozen=True, kw_only=True):
    """Terminal: the enlarged image.

    Attributes:
        upscaler: Full name of the upscaler.
        scale: Enlargement of its network.
        device_s: Seconds of computation.
        waited_s: Seconds in all.
    """

    image: Picture
    upscaler: str
    scale: int
    device_s: float
    waited_s: float


UpscaleEvent = Upscaled | Failed | Cancelled
UPSCALE_TERMINAL = (Upscaled, Failed, Cancelled)


def check_input_size(width_px: int, height_px: int) -> None:
    """Raise InvalidRequest if an image is too large to be upscaled."""
    message = (
        f"the image has {width_px}x{height_px} pixels; at most {MAX_INPUT_PIXELS:,} pixels can be upscaled, give a "
        "smaller one."
    )
    check(width_px * height_px <= MAX_INPUT_PIXELS, message, "image")


def check_output_size(width_px: int, height_px: int, param: str) -> None:
    """Raise InvalidRequest about ``param`` if an upscaled image would be too large."""
    message = (
        f"the upscaled image would have {width_px}x{height_px} pixels; at most {MAX_OUTPUT_PIXELS:,} pixels are "
        "possible, choose a smaller image, scale or size."
    )
    check(width_px * height_px <= MAX_OUTPUT_PIXELS, message, param)


def check_network_size(name: str, scale: int, width_px: int, height_px: int, param: str = "image") -> None:
    """Raise InvalidRequest about ``param`` if a network would make too large an image, before it is resized."""
    message = (
        f"upscaler {name!r} makes {scale * width_px}x{scale * height_px} pixels of the image, before they are fitted "
        f"to the scale or size; at most {MAX_OUTPUT_PIXELS:,} are possible: give an image of at most "
        f"{MAX_OUTPUT_PIXELS // scale**2:,} pixels, a network with a smaller scale, or lanczos."
    )
    check(scale**2 * width_px * height_px <= MAX_OUTPUT_PIXELS, message, param)


def upscale_work(width_px: int, height_px: int) -> float:
    """Return the cost of upscaling an image by a network, in UNet rows of the native size."""
    return max(1.0, width_px * height_px / PIXELS_PER_ROW)
