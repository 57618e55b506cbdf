"""Prompt match: the share of images that show exactly what their prompts describe.

Follows GenEval (Ghosh et al. 2023) for the scenes of the embedded model. Objects, counts, positions, size and
background are detected exactly by comparison with the rendered sprites.
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

# part -> whether a scene description specifies it
PARTS: Mapping[str, Callable[[SceneSpec], bool]] = {
    "background": lambda wish: wish.background is not None,
    "objects": lambda wish: bool(wish.names),
    "relation": lambda wish: wish.relation is not None,
    "size": lambda wish: wish.size is not None,
}


@dataclass(frozen=True)
class PromptMatch:
    """The requested scene and the verdict of each image."""

    wishes: tuple[SceneSpec, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def exact(self) -> Share:
        """Share of images that match in every part; images of the same scene description form one bootstrap group."""
        return share_of([verdict.exact for verdict in self.verdicts], self.wishes)

    @property
    def parts(self) -> dict[str, Share]:
        """Share of correct images for each part of ``PARTS``, among the images whose prompts specify that part."""
        shares = {}
        for part, specifies in PARTS.items():
            outcomes = [
                (wish, getattr(verdict, part))
                for wish, verdict in zip(self.wishes, self.verdicts, strict=True)
                if specifies(wish)
            ]
            if outcomes:
                shares[part] = share_of([is_right for _, is_right in outcomes], [wish for wish, _ in outcomes])
        return shares


def match_prompts(pictures: Sequence[Picture], prompts: Sequence[Asked]) -> PromptMatch:
    """Check each image against its prompt.

    Args:
        pictures: PIL images or arrays (height, width, 3) uint8.
        prompts: A prompt text, scene description or scene for each image.

    Raises:
        InvalidRequest: There are no images, the number of prompts differs from that of images, a prompt cannot be
            parsed, or an image has the wrong size.
    """
    if len(pictures) != len(prompts) or not pictures:
        raise InvalidRequest(f"{len(prompts)} prompts for {len(pictures)} pictures; give each picture its own prompt.")
    wishes = tuple(_wish(prompt) for prompt in prompts)
    readings = (read_picture(_pixels(picture)) for picture in pictures)
    return PromptMatch(wishes, tuple(judge(reading, wish) for reading, wish in zip(readings, wishes, strict=True)))


def _wish(prompt: Asked) -> SceneSpec:
    if isinstance(prompt, Scene):
        return SceneSpec.of(prompt)
    return parse_prompt(prompt) if isinstance(prompt, str) else prompt


def _pixels(picture: Picture) -> NDArray[np.uint8]:
    if isinstance(picture, Image.Image):
        return np.asarray(picture.convert("RGB"), dtype=np.uint8)
    return picture
