"""From what stands in the form of an experiment to its plan. No gradio, no server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from diffserve.api.errors import InvalidRequest
from diffserve.client import ImageCapabilities
from diffserve.experiments.plan import MAX_SAMPLER_CHARS, REFERENCE_STEPS, SweepPlan, numbers, quote, whole_numbers

MAX_PICTURES: Final = 400
"""A page that is left open should not paint for a night; ``diffserve sweep`` may."""

MAX_FORM_CHARS: Final = 100_000
"""Of all prompts together."""

FORM_WORDS: Final = {"num_steps": "steps", "guidance_scale": "guidance"}
"""From names of fields, as messages begin with them, to the form's own."""


class ExperimentForm(NamedTuple):
    """What somebody chose, as the form has it.

    steps, prompts  text: counts with commas between them, a prompt on each line
    num_seeds       pictures of each prompt, with the seeds first_seed, first_seed + 1, ...
    guidance_scale  a number, or text that holds one; nothing for the model's own
    has_converged   whether every picture is held against the converged one of its seed
    model           that paints, by its name; nothing for the server's own
    """

    samplers: Sequence[str]
    steps: str
    prompts: str
    num_seeds: float | None = 1
    first_seed: float | None = 0
    guidance_scale: str | float | None = None
    has_converged: bool = True
    model: str | None = None


def read_form(form: ExperimentForm, image: ImageCapabilities) -> SweepPlan:
    """The plan of ``form`` for the model ``image``, which takes a while: call it in a thread. InvalidRequest for
    anything that could not be painted.
    """
    steps = tuple(dict.fromkeys(whole_numbers(form.steps, "steps")))
    most = image.train_timesteps
    if max(steps) > most:
        raise InvalidRequest(
            f"steps has {max(steps)}; the model was trained with {most} timesteps, so {most} steps is the most.",
            param="steps",
        )
    prompts = _prompts(form.prompts)
    with _in_words_of_the_form():
        plan = SweepPlan(
            samplers=_samplers(form.samplers),
            steps=steps,
            guidance=(_guidance(form.guidance_scale, image.default_guidance_scale),),
            prompts=prompts,
            num_seeds=_whole(form.num_seeds, "pictures of each prompt", 1),
            first_seed=_whole(form.first_seed, "first seed", 0),
            reference_steps=min(REFERENCE_STEPS, most) if form.has_converged else None,
        )
    if plan.num_images > MAX_PICTURES:
        raise InvalidRequest(
            f"that is {plan.num_images} pictures, and the page paints at most {MAX_PICTURES}; choose fewer prompts, "
            "seeds, samplers or step counts, or use diffserve sweep, which can be interrupted.",
            param="prompts",
        )
    return plan


@contextmanager
def _in_words_of_the_form() -> Iterator[None]:
    """What is refused is called as the form calls it."""
    try:
        yield
    except InvalidRequest as error:
        name, is_first, rest = error.message.partition(" ")
        raise InvalidRequest(FORM_WORDS.get(name, name) + is_first + rest, param=error.param) from error


def _samplers(chosen: Sequence[str]) -> tuple[str, ...]:
    """Each once; names that are no text, or too long, are nobody's."""
    if not chosen:
        raise InvalidRequest("no sampler is chosen; choose at least one.", param="samplers")
    if not all(isinstance(name, str) and len(name) <= MAX_SAMPLER_CHARS for name in chosen):
        raise InvalidRequest(
            f"a sampler is chosen that is no name of at most {MAX_SAMPLER_CHARS} characters; choose from the list.",
            param="samplers",
        )
    return tuple(dict.fromkeys(chosen))


def _prompts(text: str) -> tuple[str, ...]:
    """One of each line that is not empty."""
    if len(text) > MAX_FORM_CHARS:
        raise InvalidRequest(
            f"the prompts have {len(text)} characters; at most {MAX_FORM_CHARS} are taken.", param="prompts"
        )
    prompts = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not prompts:
        raise InvalidRequest("there is no prompt; write at least one, each on a line of its own.", param="prompts")
    if len(prompts) > MAX_PICTURES:
        raise InvalidRequest(
            f"there are {len(prompts)} prompts, and the page paints at most {MAX_PICTURES} pictures; write fewer.",
            param="prompts",
        )
    return prompts


def _guidance(value: str | float | None, default: float) -> float:
    text = "" if value is None else str(value).strip()
    if not text:
        return default
    scales = numbers(text, "guidance")
    if len(scales) > 1:
        raise InvalidRequest(
            f"guidance is {quote(text)}; the page compares at one scale, give one number.", param="guidance"
        )
    return scales[0]


def _whole(value: float | None, name: str, default: int) -> int:
    if value is None:
        return default
    if value != value or value != int(value):
        raise InvalidRequest(f"{name} is {value:g}; give a whole number.")
    return int(value)
