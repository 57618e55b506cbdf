"""What SDXL is told of a picture's sizes beside its text (Podell et al. 2023, arXiv 2307.01952, section 2.2). No torch.

In text, as metadata and the command line have it, pairs of numbers after their names, those of the unconditional row
behind "negative_":

    original_size 640x480 crop 0x64 target_size 1024x1024 negative_original_size 256x256
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest

MAX_SIDE: Final = 16_384
SCORES: Final = (6.0, 2.5)
"""How well a picture is to please, of 10, as SDXL's refiner is told in the rows of prompt and negative prompt: the
values of its authors' code."""
NUM_SDXL_IDS: Final = 6
NUM_REFINER_IDS: Final = 5
"""Numbers that SDXL is told, and its refiner, which has a score in place of the target size."""
NAME: Final = "micro_conditioning"
_PAIR: Final = re.compile(r"(\w+) (\d{1,6})x(\d{1,6})(?: |$)")

Pair = tuple[int, int]


class MicroConditioning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes as (width, height), crops as (left, top), all in pixels. What is ``None`` is the picture's own size, for a
    crop (0, 0); and for the unconditional row what the prompt's row is told.

    original_size  of the photograph as it was taken: small ones look blurred
    crop           how much of it was cut off: (0, 0) looks centred
    target_size    of the picture that it was to become
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
            least = 0 if name.endswith("crop") else 1
            said = f"{NAME}.{name} is {pair}; give two whole numbers from {least} to {MAX_SIDE}."
            check(pair is None or all(least <= side <= MAX_SIDE for side in pair), said, NAME)

    @classmethod
    def read(cls, text: str) -> MicroConditioning:
        """From text, see above. Raises InvalidRequest."""
        found = {name: (int(first), int(second)) for name, first, second in _PAIR.findall(text.strip())}
        if not found or _PAIR.sub("", text.strip()) or not found.keys() <= set(cls.__struct_fields__):
            raise InvalidRequest(
                f"{NAME} is {text[:100]!r}; write names and pairs, for example 'original_size 640x480 crop 0x0', of "
                f"{', '.join(cls.__struct_fields__)}.",
                param=NAME,
            )
        return cls(**found)

    def __str__(self) -> str:
        pairs = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return " ".join(f"{name} {pair[0]}x{pair[1]}" for name, pair in pairs if pair is not None)

    def numbers(
        self, width_px: int, height_px: int, *, is_uncond: bool = False, has_score: bool = False
    ) -> list[float]:
        """The six numbers that one row of a picture of ``width_px`` x ``height_px`` is told, height and top first; of
        the refiner (``has_score``) five, a score in place of the target size."""
        size = width_px, height_px
        pairs = [self.original_size or size, self.crop or (0, 0), self.target_size or size]
        if is_uncond:
            own = (self.negative_original_size, self.negative_crop, self.negative_target_size)
            pairs = [one or other for one, other in zip(own, pairs, strict=True)]
        numbers: list[float] = [number for first, second in pairs for number in (second, first)]
        return [*numbers[:4], SCORES[is_uncond]] if has_score else numbers


PLAIN: Final = MicroConditioning()
"""The picture's own sizes."""
