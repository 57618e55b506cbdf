"""Prompts of a sweep, exact renderings of their scenes, and the share of images that match their prompts.

The held-out captions are those of the embedded model's evaluation. ``draw_pictures`` renders images that show exactly
what a prompt says, at varying positions. They are the reference set for distances in the feature network.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffserve.api.errors import InvalidRequest
from diffserve.experiments.intervals import Share, share_of
from diffserve.world.captions import held_out
from diffserve.world.checker import SceneSpec, Verdict, judge, read_picture
from diffserve.world.prompt_reading import parse_prompt
from diffserve.world.render import render
from diffserve.world.scenes import BACKGROUNDS, OBJECTS, Scene, is_legible, place_one, place_three, place_two

DRAWN_PER_PROMPT = 32
MAX_DRAWN = 4_096
DRAWN_SEED = 7_001
MAX_PROMPT_FILE_BYTES = 4_000_000

ImageLike = NDArray[np.uint8] | Image.Image
PromptLike = str | SceneSpec | Scene

# part -> whether a scene description specifies it
PARTS: Mapping[str, Callable[[SceneSpec], bool]] = {
    "background": lambda wish: wish.background is not None,
    "objects": lambda wish: bool(wish.names),
    "relation": lambda wish: wish.relation is not None,
    "size": lambda wish: wish.size is not None,
}


def held_out_prompts(count: int) -> tuple[str, ...]:
    """Return the first ``count`` held-out captions of the embedded model."""
    return tuple(words for _, words in held_out(count))


class BenchmarkPrompt(NamedTuple):
    """A prompt of a file or folder.

    Attributes:
        text: The prompt.
        name: Name of its file without suffix, "" for a line of a file.
        metadata: The JSON object that the prompt is part of, ``None`` if there is none.
    """

    text: str
    name: str = ""
    metadata: dict[str, Any] | None = None


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read the texts of :func:`read_benchmark_prompts`.

    Raises:
        InvalidRequest: The file cannot be read or contains no prompts.
    """
    return tuple(prompt.text for prompt in read_benchmark_prompts(path))


def read_benchmark_prompts(path: Path) -> tuple[BenchmarkPrompt, ...]:
    """Read prompts from a file or folder; empty lines are skipped.

    ``path`` is a text file with one prompt per line, a ``.jsonl`` file of objects with a ``prompt`` (GenEval), or a
    folder of ``.txt`` files with one prompt each (DPG-Bench), which are sorted by name.

    Raises:
        InvalidRequest: A file cannot be read, a line has another form, or there are no prompts.
    """
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        prompts = [BenchmarkPrompt(" ".join(_read_text(file).split()), file.stem) for file in files]
        form = "it needs .txt files with one prompt each"
    elif path.suffix == ".jsonl":
        lines = enumerate(_read_text(path).splitlines(), start=1)
        prompts = [_read_line(path, number, line) for number, line in lines if line.strip()]
        form = 'write one JSON object with a "prompt" per line'
    else:
        prompts = [BenchmarkPrompt(line.strip()) for line in _read_text(path).splitlines()]
        form = "write one per line"
    prompts = [prompt for prompt in prompts if prompt.text]
    if not prompts:
        raise InvalidRequest(f"{str(path)!r} has no prompts; {form}.", param="prompts")
    return tuple(prompts)


def _read_line(file: Path, number: int, line: str) -> BenchmarkPrompt:
    """Read a line of a JSONL file."""
    try:
        metadata = json.loads(line)
        return BenchmarkPrompt(metadata["prompt"].strip(), metadata=metadata)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InvalidRequest(
            f'line {number} of {str(file)!r} is not a JSON object with a text as "prompt".', param="prompts"
        ) from None


def _read_text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_PROMPT_FILE_BYTES).decode("utf-8-sig")
        is_text = "\0" not in text  # in UTF-16 without a mark every other byte of English text is zero
    except OSError as error:
        raise InvalidRequest(f"cannot read prompts from {str(file)!r}: {error.strerror}.", param="prompts") from None
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        message = f"{str(file)!r} is not UTF-8 text; save it as UTF-8 with one prompt per line."
        raise InvalidRequest(message, param="prompts")
    return text


def read_wishes(prompts: Sequence[str]) -> tuple[SceneSpec, ...]:
    """Parse each prompt into a scene description.

    Raises:
        InvalidRequest: A prompt is outside the language of the embedded model.
    """
    return tuple(parse_prompt(prompt) for prompt in prompts)


def draw_pictures(
    wishes: Sequence[SceneSpec], width_px: int, height_px: int, *, each: int
) -> Iterator[NDArray[np.uint8]]:
    """Render ``each`` images (height, width, 3) of every scene description, reproducibly."""
    for index, wish in enumerate(wishes):
        rng = random.Random(DRAWN_SEED + index)
        yield from (render(scene_like(wish, rng), width_px, height_px) for _ in range(each))


def num_drawn_per_prompt(num_prompts: int) -> int:
    """Return the number of images to render per prompt."""
    return max(2, min(DRAWN_PER_PROMPT, MAX_DRAWN // num_prompts))


def scene_like(wish: SceneSpec, rng: random.Random) -> Scene:
    """Sample a scene that shows ``wish``; unspecified parts are chosen at random."""
    while True:
        background = wish.background or rng.choice(BACKGROUNDS)
        names = wish.names or (rng.choice(list(OBJECTS)),)
        scene = _place(names, wish, background, rng)
        if is_legible(scene) or (wish.background and wish.names):
            return scene


def _place(names: tuple[str, ...], wish: SceneSpec, background: str, rng: random.Random) -> Scene:
    if len(names) == 1:
        return place_one(names[0], wish.size or "plain", background, rng)
    if len(names) == 2:
        return place_two(names[0], names[1], wish.relation, background, rng)
    return place_three((names[0], names[1], names[2]), wish.relation, background, rng)


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


def match_prompts(pictures: Sequence[ImageLike], prompts: Sequence[PromptLike]) -> PromptMatch:
    """Check each image against its prompt.

    Follows GenEval (Ghosh et al. 2023) for the scenes of the embedded model. Objects, counts, positions, size and
    background are detected exactly by comparison with the rendered sprites.

    Args:
        pictures: PIL images or arrays (height, width, 3) uint8.
        prompts: A prompt text, scene description or scene for each image.

    Raises:
        InvalidRequest: There are no images, the number of prompts differs from that of images, a prompt cannot be
            parsed, or an image has the wrong size.
    """
    if len(pictures) != len(prompts) or not pictures:
        raise InvalidRequest(f"{len(prompts)} prompts for {len(pictures)} images; give one prompt per image.")
    wishes = tuple(_wish(prompt) for prompt in prompts)
    readings = (read_picture(_pixels(picture)) for picture in pictures)
    return PromptMatch(wishes, tuple(judge(reading, wish) for reading, wish in zip(readings, wishes, strict=True)))


def _wish(prompt: PromptLike) -> SceneSpec:
    if isinstance(prompt, Scene):
        return SceneSpec.of(prompt)
    return parse_prompt(prompt) if isinstance(prompt, str) else prompt


def _pixels(picture: ImageLike) -> NDArray[np.uint8]:
    if isinstance(picture, Image.Image):
        return np.asarray(picture.convert("RGB"), dtype=np.uint8)
    return picture
