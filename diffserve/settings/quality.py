"""Quality names of the page, the API and the command line, and the number of steps that each stands for.

OpenAI's names (low, medium, high, and the older standard and hd) map to the nearest name here.
"""

from __future__ import annotations

from typing import Final

from diffserve.api.types import ModelInfo

QUALITIES: Final = {"draft": 0.4, "standard": 1.0, "fine": 2.0}
"""Number of steps by quality, as a multiple of the model's default."""

SYNONYMS: Final = {"low": "draft", "medium": "standard", "high": "fine", "hd": "fine", "xhigh": "fine", "max": "fine"}
AUTO: Final = "auto"


def quality_steps(info: ModelInfo) -> dict[str, int]:
    """Return the number of steps of each quality, in ascending order: at least 1, at most the training length."""
    steps = {name: round(share * info.default_num_steps) for name, share in QUALITIES.items()}
    return {name: min(max(1, count), info.train_timesteps) for name, count in steps.items()}


def is_quality(word: str) -> bool:
    """Return whether ``word`` is a known quality; "auto" is the model's default."""
    return word == AUTO or word in QUALITIES or word in SYNONYMS


def steps_of(word: str, info: ModelInfo) -> int:
    """Return the number of steps of the quality ``word``.

    Raises:
        KeyError: :func:`is_quality` does not know ``word``.
    """
    return info.default_num_steps if word == AUTO else quality_steps(info)[SYNONYMS.get(word, word)]
