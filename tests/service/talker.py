"""Language model of the service tests: real weights that produce scripted answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.engine.rewriting.scripted import Script

NAME = "talker"
SCRIPT: Script = {
    "fox": ("a red fox", ", deep snow", ", moonlight"),
    "sign": "a shop at night",
    "either": ("a boat", "a ship", "a raft"),
    "unsure": ("an apple", "a pear", "a plum", "a peach", "a lemon", "a fig", "a lime", "a date"),
    "sorry": "I'm sorry, but I can't help with that.",
    "umlaut": ("ein B", "är", " \N{FOX FACE}"),
}
"""A word of the last message -> the pieces of the answer, or alternatives for the last two."""

FORKS = {"either": 0.5, "unsure": 0.1}
"""By so many nats the first alternative is likelier than each other."""

FOX = "".join(SCRIPT["fox"])
SETTINGS = {"DIFFSERVE_TEXT_DTYPE": "float32", "DIFFSERVE_TEXT_REWRITER_ENTROPY": "0.8"}
"""The threshold lies between "either", at half a nat a token, and "unsure", at one."""


def save(workspace: Path) -> dict[str, str]:
    """Write the model into ``workspace`` and return the environment of a server that loads it."""
    from tests.engine.rewriting import scripted

    return {**SETTINGS, "DIFFSERVE_TEXT_MODEL": str(scripted.save(workspace / NAME, SCRIPT, forks=FORKS))}
