"""Reads the plan of a sweep from what a user wrote: command, HTTP body and page share this reader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from diffserve.api.errors import InvalidRequest
from diffserve.experiments.axes import (
    LORA,
    MAIN_AXES,
    NO_WILDCARDS,
    PROMPT,
    Value,
    check_axis_name,
    numbers,
    read_values,
    split_axis,
    whole_numbers,
)
from diffserve.experiments.plan import (
    DEFAULT_SAMPLERS,
    DEFAULT_SEEDS,
    DEFAULT_STEPS,
    MAX_PROMPTS,
    REFERENCE_STEPS,
    SweepPlan,
    double_looks,
    read_differences,
)
from diffserve.experiments.power import DIFFERENCES
from diffserve.experiments.prompts import held_out_prompts
from diffserve.models.learned_samplers import NOT_TAKEN
from diffserve.models.templates import Wildcards

DEFAULT_MAX_IMAGES: Final = 1024
"""Images of a cell at the last look of a sweep that runs until it is decided."""

AxisText = str | Sequence[Value]
"""Values of an axis as text such as "5,10-50 (+10)", or as a list of values."""


def read_plan(
    axes: Iterable[tuple[str, AxisText]],
    *,
    prompts: int | Sequence[str],
    guidance: float,
    samplers: Sequence[str] = DEFAULT_SAMPLERS,
    steps: Sequence[int] = DEFAULT_STEPS,
    num_seeds: int | None = None,
    first_seed: int = 0,
    reference_steps: int | None = REFERENCE_STEPS,
    until_decided: bool = False,
    max_images: int = DEFAULT_MAX_IMAGES,
    detect: str | None = None,
    learned_steps: Callable[[Sequence[str]], Mapping[str, int]] = lambda _: {},
    model_guidance: Mapping[str, float] | None = None,
    wildcards: Wildcards = NO_WILDCARDS,
    shown: Callable[[str], str] = str,
) -> SweepPlan:
    """Return the plan of a sweep.

    Args:
        axes: Name and values of each axis, among them ``samplers``, ``steps`` and ``guidance``.
        prompts: Prompt texts, or the number of held-out captions of the embedded model. The axis ``prompt`` replaces
            the captions.
        guidance: Guidance scale if it is no axis.
        samplers: Samplers if they are no axis.
        steps: Step counts if they are no axis.
        num_seeds: Images per prompt, those of the first look if the sweep runs until it is decided.
        first_seed: Seed of the first image.
        reference_steps: DDIM steps of the converged images, ``None`` for none.
        until_decided: Whether cells with open verdicts get more images.
        max_images: Images of a cell at the last look.
        detect: Differences of interest such as "exact=5,psnr_db=0.5".
        learned_steps: Returns the steps of the learned samplers among the samplers.
        model_guidance: Guidance scale of each model, if the models are an axis and the guidance scale is none.
        wildcards: Files that the templates of the axis ``prompt`` may name.
        shown: Returns how messages call a field, such as ``--steps``.

    Raises:
        InvalidRequest: A value is malformed or not allowed.
    """
    texts = _texts(axes)
    if isinstance(prompts, int) and prompts > MAX_PROMPTS:
        message = f"{shown('prompts')} is {prompts}; at most {MAX_PROMPTS} are allowed."
        raise InvalidRequest(message, param="prompts")
    matrix = read_values(PROMPT, texts.pop(PROMPT), wildcards) if PROMPT in texts else ()
    if isinstance(prompts, int):
        words = tuple(map(str, matrix[:1])) or held_out_prompts(max(0, prompts))
    else:
        words = tuple(prompts)
    seeds = DEFAULT_SEEDS if num_seeds is None else num_seeds
    looks = double_looks(seeds, len(words), max_images, shown("max_images")) if until_decided and words else ()
    labels = {name: shown(name) for name in ("samplers", "steps", "guidance")}
    names = split_axis(texts.pop("samplers"), labels["samplers"]) if "samplers" in texts else tuple(samplers)
    return SweepPlan(
        samplers=names,
        learned=dict(learned_steps(names)),
        model_guidance={} if "guidance" in texts else dict(model_guidance or {}),
        steps=whole_numbers(texts.pop("steps"), labels["steps"]) if "steps" in texts else tuple(steps),
        guidance=numbers(texts.pop("guidance"), labels["guidance"]) if "guidance" in texts else (guidance,),
        axes=({PROMPT: matrix} if matrix else {}) | {name: read_values(name, text) for name, text in texts.items()},
        prompts=words,
        num_seeds=looks[-1] if looks else seeds,
        first_seed=first_seed,
        reference_steps=reference_steps,
        looks=looks,
        detect=dict(DIFFERENCES) if detect is None else read_differences(detect, shown("detect")),
    )


def _texts(axes: Iterable[tuple[str, AxisText]]) -> dict[str, str]:
    """Return the text of each axis by its canonical name.

    Raises:
        InvalidRequest: An axis is unknown or given twice.
    """
    texts: dict[str, str] = {}
    for name, values in axes:
        field = name if name.startswith(LORA) else name.replace("-", "_").lower()
        check_axis_name(field)
        field = MAIN_AXES.get(field, field)
        if field in texts:
            raise InvalidRequest(f"the axis {field} is given twice; write all of its values in one place.", param=field)
        separator = "\n" if field == PROMPT else ","
        texts[field] = values if isinstance(values, str) else separator.join(map(str, values))
    return texts


def plan_warnings(plan: SweepPlan) -> tuple[str, ...]:
    """Return sentences about learned samplers that a plan compares with nothing, or varies without effect."""
    warnings = []
    pairs = [{cell.sampler, baseline.sampler} for cell, baseline in plan.comparisons]
    for sampler, steps in plan.learned.items():
        if not any(sampler in pair and len(pair) > 1 for pair in pairs):
            warnings.append(f"{sampler} is compared with no other cell; add {steps} to the steps.")
        warnings += [f"{name} has no effect with {sampler}." for name in NOT_TAKEN if len(plan.axes.get(name, ())) > 1]
    return tuple(warnings)
