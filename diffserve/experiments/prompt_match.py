"""Prompt match: the share of pictures that show exactly what their prompts ask for.

GenEval's idea (Ghosh et al. 2023) in the embedded model's picture world, where the answer is exact: the objects and how
many, where they stand, how large the only one is, and the background, read by comparing with the drawn sprites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffserve.api.errors import InvalidRequest
from diffserve.experiments.intervals import Share, share_of
from diffserve.world.checker import SceneSpec, Verdict, judge, read_picture
from diffserve.world.prompt_reading import parse_prompt
from diffserve.world.scenes import Scene

Picture = NDArray[np.uint8] | Image.Image
Asked = str | SceneSpec | Scene

# part -> whether a wish asks for it
PARTS: Mapping[str, Callable[[SceneSpec], bool]] = {
    "background": lambda wish: wish.background is not None,
    "objects": lambda wish: bool(wish.names),
    "relation": lambda wish: wish.relation is not None,
    "size": lambda wish: wish.size is not None,
}


@dataclass(frozen=True)
class PromptMatch:
    """One verdict for each picture, beside what it was asked to show."""

    wishes: tuple[SceneSpec, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def exact(self) -> Share:
        """Pictures that are right in everything they were asked for. Pictures of one wish are resampled together."""
        return share_of([verdict.exact for verdict in self.verdicts], self.wishes)

    @property
    def parts(self) -> dict[str, Share]:
        """For every part of ``PARTS`` that is asked for at all, the share among the pictures that were asked for it."""
        found = {}
        for part, is_asked in PARTS.items():
            asked = [
                (wish, getattr(one, part))
                for wish, one in zip(self.wishes, self.verdicts, strict=True)
                if is_asked(wish)
            ]
            if asked:
                found[part] = share_of([is_right for _, is_right in asked], [wish for wish, _ in asked])
        return found


def match_prompts(pictures: Sequence[Picture], prompts: Sequence[Asked]) -> PromptMatch:
    """Check each picture, PIL or (height, width, 3) uint8, against its own prompt, wish or scene.

    Raises :class:`InvalidRequest` without pictures, where there are not as many prompts as pictures, for a prompt
    outside the picture world's language, and for pictures that are not of its scale.
    """
    if len(pictures) != len(prompts) or not pictures:
        raise InvalidRequest(f"{len(prompts)} prompts for {len(pictures)} pictures; give each picture its own prompt.")
    wishes = tuple(_wish(prompt) for prompt in prompts)
    readings = (read_picture(_pixels(picture)) for picture in pictures)
    return PromptMatch(wishes, tuple(judge(reading, wish) for reading, wish in zip(readings, wishes, strict=True)))


def _wish(asked: Asked) -> SceneSpec:
    if isinstance(asked, Scene):
        return SceneSpec.of(asked)
    return parse_prompt(asked) if isinstance(asked, str) else asked


def _pixels(picture: Picture) -> NDArray[np.uint8]:
    if isinstance(picture, Image.Image):
        return np.asarray(picture.convert("RGB"), dtype=np.uint8)
    return picture
