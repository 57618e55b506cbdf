"""The texts that each step of an image reads: prompt editing, alternation, and prompts of several parts (no torch)."""

from __future__ import annotations

from typing import NamedTuple

from diffserve.api.prompt_schedule import Area, check_num_texts, is_scheduled, prompt_parts, texts_by_step
from schedulers import StepTable

TextPair = tuple[str, str | None]
"""A prompt and a negative prompt; ``None`` without guidance."""


class PromptSchedule(NamedTuple):
    """Texts of an image whose prompt has editing, alternation, AND or MASK.

    Attributes:
        pairs: All distinct texts, prompts and negative prompts side by side; the shorter list is filled with its last.
        weights: Weight of each part of the prompt; (1.0,) without AND.
        areas: Area of each part of the prompt; ``None`` for the entire image.
        cond_at: Index in ``pairs`` of the text of each part, by row of the step table.
        uncond_at: Index in ``pairs`` of the negative prompt, by row of the step table.
    """

    pairs: tuple[TextPair, ...]
    weights: tuple[float, ...]
    areas: tuple[Area | None, ...]
    cond_at: tuple[tuple[int, ...], ...]
    uncond_at: tuple[int, ...]

    @property
    def is_composed(self) -> bool:
        """Whether the prompt has several parts or an area."""
        return len(self.weights) > 1 or self.areas != (None,)


def schedule_prompts(prompt: str, negative_prompt: str, table: StepTable, *, is_guided: bool) -> PromptSchedule | None:
    """Return the schedule of two prompts over the rows of ``table``, or ``None`` if both are the same at every step.

    Steps are those that run: with an init image those that its strength leaves. All rows of a step read the same text.

    Raises:
        InvalidRequest: There are too many parts, texts, or brackets of editing and alternation.
    """
    negative = negative_prompt if is_guided else ""
    if not is_scheduled(prompt, negative):
        return None
    parts = prompt_parts(prompt, table.num_steps)
    negatives = texts_by_step(negative, table.num_steps, "negative_prompt")
    conds = list(dict.fromkeys(text for part in parts for text in part.texts))
    unconds = list(dict.fromkeys(negatives))
    check_num_texts(conds, "prompt")
    check_num_texts(unconds, "negative_prompt")
    count = max(len(conds), len(unconds))
    filled = [[*texts, *texts[-1:] * (count - len(texts))] for texts in (conds, unconds)]
    steps = table.step_of_row.tolist()
    return PromptSchedule(
        pairs=tuple((cond, uncond if is_guided else None) for cond, uncond in zip(*filled, strict=True)),
        weights=tuple(part.weight for part in parts),
        areas=tuple(part.area for part in parts),
        cond_at=tuple(tuple(conds.index(part.texts[step]) for part in parts) for step in steps),
        uncond_at=tuple(unconds.index(negatives[step]) for step in steps),
    )
