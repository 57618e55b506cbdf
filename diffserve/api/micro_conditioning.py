"""Size conditioning of SDXL (Podell et al. 2023, arXiv 2307.01952, section 2.2).

In metadata and on the command line it is text: names and pairs, "negative_" for the unconditional row. For example:
original_size 640x480 crop 0x64 target_size 1024x1024 negative_original_size 256x256. This module does not import torch.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest

MAX_SIDE: Final = 16_384
SCORES: Final = (6.0, 2.5)
"""Aesthetic scores (of 10) for the prompt and the negative prompt of SDXL's refiner, as in its reference code."""
NUM_SDXL_IDS: Final = 6
NUM_REFINER_IDS: Final = 5
"""Length of the size conditioning of SDXL, and of its refiner, which has a score in place of the target size."""
NAME: Final = "micro_conditioning"
_PAIR: Final = re.compile(r"(\w+) (\d{1,6})x(\d{1,6})(?: |$)")

Pair = tuple[int, int]


class MicroConditioning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Original size, crop and target size of an image, for the prompt's row and for the unconditional row.

    Sizes are (width, height), crops are (left, top), in pixels. ``None`` means the size of the image itself, or (0, 0)
    for a crop; for the unconditional row it means the value of the prompt's row.

    Attributes:
        original_size: Size of the training image before resizing; small values look blurred.
        crop: Offset of the crop; (0, 0) looks centered.
        target_size: Size after resizing and cropping.
    """

    original_size: Pair | None = None
    crop: Pair | None = None
    target_size: Pair | None = None
    negative_original_size: Pair | None = None
    negative_crop: Pair | None = None
    negative_target_size: Pair | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            pair = getattr(self, name)
            low = 0 if name.endswith("crop") else 1
            message = f"{NAME}.{name} is {pair}; give two whole numbers from {low} to {MAX_SIDE}."
            check(pair is None or all(low <= side <= MAX_SIDE for side in pair), message, NAME)

    @classmethod
    def read(cls, text: str) -> MicroConditioning:
        """Parse the text form that ``str()`` returns.

        Raises:
            InvalidRequest: The text is malformed.
        """
        pairs = {name: (int(first), int(second)) for name, first, second in _PAIR.findall(text.strip())}
        if not pairs or _PAIR.sub("", text.strip()) or not pairs.keys() <= set(cls.__struct_fields__):
            raise InvalidRequest(
                f"{NAME} is {text[:100]!r}; write names and pairs, for example 'original_size 640x480 crop 0x0', of "
                f"{', '.join(cls.__struct_fields__)}.",
                param=NAME,
            )
        return cls(**pairs)

    def of_crop(self, size: tuple[int, int], crop: tuple[int, int], target_size: tuple[int, int]) -> MicroConditioning:
        """Return these values, and for those that are not given the values of a crop.

        Args:
            size: Width and height of the entire image.
            crop: Left and top of the crop.
            target_size: Width and height of the crop.
        """
        return msgspec.structs.replace(
            self,
            original_size=self.original_size or size,
            crop=self.crop or crop,
            target_size=self.target_size or target_size,
        )

    def __str__(self) -> str:
        pairs = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return " ".join(f"{name} {pair[0]}x{pair[1]}" for name, pair in pairs if pair is not None)

    def numbers(
        self, width_px: int, height_px: int, *, is_uncond: bool = False, has_score: bool = False
    ) -> list[float]:
        """Return the numbers for one row of an image of ``width_px`` x ``height_px``, height and top first.

        Args:
            width_px: Width of the image.
            height_px: Height of the image.
            is_uncond: Whether the row is the unconditional one.
            has_score: For the refiner: five numbers, an aesthetic score in place of the target size; else six.
        """
        size = width_px, height_px
        pairs = [self.original_size or size, self.crop or (0, 0), self.target_size or size]
        if is_uncond:
            negative_pairs = (self.negative_original_size, self.negative_crop, self.negative_target_size)
            pairs = [negative or positive for negative, positive in zip(negative_pairs, pairs, strict=True)]
        numbers: list[float] = [number for first, second in pairs for number in (second, first)]
        return [*numbers[:4], SCORES[is_uncond]] if has_score else numbers


PLAIN: Final = MicroConditioning()
"""Size conditioning with the sizes of the image itself."""
