"""Quality in one word, for the page, the API and the command line: how many steps each word stands for.

OpenAI's words (low, medium, high, and the older standard and hd) mean the nearest of ours.
"""

from __future__ import annotations

from typing import Final

from diffserve.api.types import ModelInfo

QUALITIES: Final = {"draft": 0.4, "standard": 1.0, "fine": 2.0}
"""Steps worth choosing between, as shares of what the model takes by default."""

SYNONYMS: Final = {"low": "draft", "medium": "standard", "high": "fine", "hd": "fine", "xhigh": "fine", "max": "fine"}
AUTO: Final = "auto"


def quality_steps(info: ModelInfo) -> dict[str, int]:
    """Steps by quality, the fewest first: at least one, and at most the training length."""
    steps = {name: round(share * info.default_num_steps) for name, share in QUALITIES.items()}
    return {name: min(max(1, count), info.train_timesteps) for name, count in steps.items()}


def is_quality(word: str) -> bool:
    """Whether ``word`` says a quality, "auto" (as the model does best) included."""
    return word == AUTO or word in QUALITIES or word in SYNONYMS


def steps_of(word: str, info: ModelInfo) -> int:
    """The steps that ``word`` stands for. KeyError for a word that :func:`is_quality` does not know."""
    return info.default_num_steps if word == AUTO else quality_steps(info)[SYNONYMS.get(word, word)]
