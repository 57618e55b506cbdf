"""What can be asked for in captions, as the file that tells others what the model knows."""

from __future__ import annotations

from pathlib import Path

import msgspec

from diffserve.vocabulary import WORLD_FILE, Vocabulary
from diffserve.world.prompt_reading import caption_words
from diffserve.world.scenes import COLORS, OBJECTS, PLACES


def known_world() -> Vocabulary:
    """What the embedded model can be asked for."""
    words = tuple(sorted(caption_words()))
    return Vocabulary(objects=tuple(OBJECTS), places=PLACES, colors=tuple(COLORS), words=words)


def write_world(directory: Path) -> None:
    """Put it beside the weights."""
    content = msgspec.json.format(msgspec.json.encode(known_world()), indent=1)
    (directory / WORLD_FILE).write_bytes(content + b"\n")
