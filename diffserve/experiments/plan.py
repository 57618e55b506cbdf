"""The plan of a sweep: axes, cells and cost, without torch, engine or files.

A cell is one combination of sampler, steps, guidance and further request fields. All cells use the same prompts and
seeds, and thus the same starting latents. For each guidance, and each setting that changes the image, there is also a
converged reference: DDIM with ``reference_steps`` steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.api.fields import MAX_SEED
from diffserve.api.types import DiffusionParams, GenerationRequest, ModelInfo
from diffserve.experiments.axes import (
    MAX_AXIS_VALUES,
    Settings,
    Value,
    check_axes,
    numbers,
    quote,
    split_axis,
    target_of,
    write_settings,
)
from diffserve.experiments.estimates import Measure
from diffserve.experiments.power import ASSUMED_DEVIATIONS, DIFFERENCES
from schedulers import SAMPLERS, ScheduleError, resolve_sampler

DEFAULT_SAMPLERS = ("ddpm", "ddim", "dpmpp_2m")
DEFAULT_STEPS = (5, 10, 20, 50, 100)
DEFAULT_PROMPTS = 64
DEFAULT_SEEDS = 4
REFERENCE_SAMPLER = "ddim"
REFERENCE_STEPS = 200
MAX_PROMPTS = 2_000
MAX_PICTURES = 10_000
Place = tuple[int, int]
"""(prompt index, seed index): the key that pairs an image with those of other cells."""

MAX_SAMPLER_CHARS = 100
TIMED_ROUNDS = 3
"""Number of times one image of each cell is generated alone to measure its time."""


CellLine = tuple[str, float, Settings]
"""(sampler, guidance, settings): one line of a chart, or one row of an image grid."""

Target = tuple[float, Settings]
"""(guidance, settings that change the converged image)."""


class Cell(msgspec.Struct, frozen=True, order=True):
    """One combination of settings.

    Attributes:
        sampler: Canonical name, with an optional sigma schedule.
        num_steps: Denoising steps.
        guidance_scale: Guidance scale.
        is_reference: Whether its images are the converged ones.
        settings: Further request fields in the order of the axes.
    """

    sampler: str
    num_steps: int
    guidance_scale: float
    is_reference: bool = False
    settings: Settings = ()

    @property
    def label(self) -> str:
        """Display name made of sampler, steps and settings."""
        name = f"{self.sampler} {self.num_steps}{write_settings(self.settings)}"
        return f"{name} (converged)" if self.is_reference else name

    @property
    def line(self) -> CellLine:
        """Everything but the steps: one line of a chart."""
        return self.sampler, self.guidance_scale, self.settings

    @property
    def target(self) -> Target:
        """Guidance scale and settings that determine the converged image; cells with equal targets share that image."""
        return self.guidance_scale, target_of(self.settings)

    @property
    def slug(self) -> str:
        """The cell as a part of a file name."""
        name = f"{self.sampler.replace(' ', '_')}-{self.num_steps}-g{self.guidance_scale:g}"
        name += re.sub(r"[^\w.-]+", "_", write_settings(self.settings).replace(", ", "-"))
        return f"converged-{name}" if self.is_reference else name

    @property
    def rows(self) -> int:
        """UNet rows per image: two per evaluation with guidance (a first or last step may need one less)."""
        sampler = SAMPLERS[self.sampler.split()[0]]
        return self.num_steps * sampler.evaluations_per_step * (2 if self.guidance_scale > 1 else 1)


class PlannedImage(msgspec.Struct, frozen=True):
    """One image to generate, with the indices of its prompt and seed in the plan."""

    cell: Cell
    prompt_index: int
    seed_index: int

    @property
    def place(self) -> Place:
        """Key that pairs this image with those of other cells."""
        return self.prompt_index, self.seed_index


class SweepPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The axes of a comparison and the prompts and seeds to compare on.

    Attributes:
        samplers: Sampler names as in a request, each optionally followed by a sigma schedule.
        steps: Step counts.
        guidance: Guidance scales.
        prompts: Prompt texts.
        axes: Values of further request fields by name; ``lora:NAME`` is the scale of a LoRA.
        num_seeds: Images per prompt.
        first_seed: Image s of prompt p has the seed ``first_seed + p * num_seeds + s`` in every cell.
        reference_steps: DDIM steps of the converged image, ``None`` for no converged images.
        looks: Seeds per prompt after which the verdicts are looked at, increasing up to ``num_seeds``; a cell whose
            verdicts are decided gets no more images. Empty: all seeds, and one look.
        detect: Differences of interest by the name of the measure. They decide when a verdict is open, and a
            difference that is certainly smaller counts as equivalence.

    Raises:
        InvalidRequest: An axis is empty or too long, a value is out of range, or a sampler is unknown.
    """

    samplers: tuple[str, ...]
    steps: tuple[int, ...]
    guidance: tuple[float, ...]
    prompts: tuple[str, ...]
    axes: dict[str, tuple[Value, ...]] = msgspec.field(default_factory=dict)
    num_seeds: int = DEFAULT_SEEDS
    first_seed: int = 0
    reference_steps: int | None = REFERENCE_STEPS
    looks: tuple[int, ...] = ()
    detect: dict[str, float] = msgspec.field(default_factory=lambda: dict(DIFFERENCES))

    def __post_init__(self) -> None:
        for name in ("samplers", "steps", "guidance", "prompts"):
            if not getattr(self, name):
                raise InvalidRequest(f"{name} is empty; a sweep needs at least one value on every axis.", param=name)
        samplers, steps, guidance = set(self.samplers), set(self.steps), set(self.guidance)
        for name, num in (("samplers", len(samplers)), ("steps", len(steps)), ("guidance", len(guidance))):
            if num > MAX_AXIS_VALUES:
                raise InvalidRequest(f"{name} has {num} values; at most {MAX_AXIS_VALUES} are allowed.", param=name)
        _check_range("prompts", len(self.prompts), 1, MAX_PROMPTS)
        _check_range("seeds", self.num_seeds, 1, MAX_PICTURES // len(self.prompts))
        _check_range("seed", self.first_seed, 0, MAX_SEED - len(self.prompts) * self.num_seeds)
        if self.looks and (list(self.looks) != sorted(set(self.looks)) or self.looks[-1] != self.num_seeds):
            raise InvalidRequest(f"looks is {self.looks}; give increasing seeds per prompt up to {self.num_seeds}.")
        _check_differences(self.detect)
        check_axes(self.axes)
        if self.reference_steps is not None:
            _check_range("reference_steps", self.reference_steps, 1, None)
        for text in sorted(samplers):
            canonical_sampler(text)
        for num_steps, scale in product(sorted(steps), sorted(guidance)):
            DiffusionParams(num_steps=num_steps, guidance_scale=scale)
        for prompt in sorted(set(self.prompts)):
            GenerationRequest(prompt=prompt)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Distinct cells ordered by steps, with all samplers of one step count next to each other."""
        names = [canonical_sampler(text) for text in dict.fromkeys(self.samplers)]
        combinations = product(sorted(set(self.steps)), dict.fromkeys(self.guidance), self._settings, names)
        cells = (Cell(name, steps, float(scale), settings=settings) for steps, scale, settings, name in combinations)
        return tuple(dict.fromkeys(cells))

    @property
    def _settings(self) -> tuple[Settings, ...]:
        """All combinations of the values of the axes."""
        values = (dict.fromkeys(axis) for axis in self.axes.values())
        return tuple(tuple(zip(self.axes, combination, strict=True)) for combination in product(*values))

    @property
    def references(self) -> tuple[Cell, ...]:
        """The converged cell of each target, if there are any."""
        return tuple(cell for cell in dict.fromkeys(map(self.reference_of, self.cells)) if cell is not None)

    @property
    def all_cells(self) -> tuple[Cell, ...]:
        """Compared cells followed by the converged cells."""
        return *self.cells, *self.references

    @property
    def comparisons(self) -> tuple[tuple[Cell, Cell], ...]:
        """(cell, baseline) pairs that differ on one axis only.

        The baseline has the first sampler, guidance scale or value of an axis, or the most steps.
        """
        first, max_steps = self.cells[0], max(self.steps)
        pairs = []
        for cell in self.cells:
            changes: list[dict[str, Any]] = [
                {"sampler": first.sampler},
                {"num_steps": max_steps},
                {"guidance_scale": first.guidance_scale},
            ]
            for index, setting in enumerate(first.settings):
                changes.append({"settings": (*cell.settings[:index], setting, *cell.settings[index + 1 :])})
            for change in changes:
                baseline = msgspec.structs.replace(cell, **change)
                pairs += [(cell, baseline)] if baseline != cell else []
        return tuple(pairs)

    @property
    def places(self) -> tuple[Place, ...]:
        """(prompt index, seed index) of every image of a cell."""
        return tuple(product(range(len(self.prompts)), range(self.num_seeds)))

    @property
    def num_images(self) -> int:
        """Total number of images, including references."""
        return len(self.places) * len(self.all_cells)

    @property
    def num_painted_rows(self) -> int:
        """UNet rows of all images, without the images that are timed alone."""
        return len(self.places) * sum(cell.rows for cell in self.all_cells)

    @property
    def num_rows(self) -> int:
        """Total UNet rows, including the images that are timed alone."""
        return self.num_painted_rows + TIMED_ROUNDS * sum(cell.rows for cell in self.all_cells)

    def places_until(self, num_seeds: int) -> tuple[Place, ...]:
        """Return the places of the first ``num_seeds`` seeds of each prompt."""
        return tuple(place for place in self.places if place[1] < num_seeds)

    def reference_of(self, cell: Cell) -> Cell | None:
        """Return the converged cell that ``cell`` is compared with, ``None`` for a converged cell itself."""
        if self.reference_steps is None or cell.is_reference:
            return None
        scale, settings = cell.target
        return Cell(REFERENCE_SAMPLER, self.reference_steps, scale, is_reference=True, settings=settings)

    def seed_of(self, place: Place) -> int:
        """Return the seed of an image, which is the same in every cell and differs between prompts."""
        return self.first_seed + place[0] * self.num_seeds + place[1]

    def images(self) -> Iterator[PlannedImage]:
        """Yield all images: references first, then cells by steps with the samplers of one step count interleaved.

        This order lets cells of one step count share batches, and an interrupted sweep has complete cells.
        """
        waves = [
            self.references,
            *([cell for cell in self.cells if cell.num_steps == n] for n in sorted(set(self.steps))),
        ]
        for wave in waves:
            for place in self.places:
                yield from (PlannedImage(cell, *place) for cell in wave)

    def check(self, info: ModelInfo) -> None:
        """Check that the plan has converged images and that its step counts fit the model.

        Raises:
            InvalidRequest: ``reference_steps`` is missing, or a step count exceeds the model's training timesteps.
        """
        if self.reference_steps is None:
            raise InvalidRequest("reference_steps is missing; a sweep compares with converged images.")
        for name, steps in (("steps", max(self.steps)), ("reference_steps", self.reference_steps)):
            if steps > info.train_timesteps:
                raise InvalidRequest(
                    f"{name} has {steps}; {info.model_id} was trained with {info.train_timesteps} timesteps, so "
                    f"{info.train_timesteps} steps is the maximum.",
                    param=name,
                )


def cell_names(cells: Iterable[Cell]) -> dict[Cell, str]:
    """Return the display names of ``cells``, which include the guidance only if there are several."""
    cells = tuple(cells)
    several = len({cell.guidance_scale for cell in cells}) > 1
    return {cell: f"{cell.label}, guidance {cell.guidance_scale:g}" if several else cell.label for cell in cells}


def canonical_sampler(text: str) -> str:
    """Return the canonical name of a sampler, with its sigma schedule if there is one.

    Raises:
        InvalidRequest: The sampler is unknown; the message suggests the closest name.
    """
    if len(text) > MAX_SAMPLER_CHARS:  # searching the closest match of a long name takes seconds
        raise InvalidRequest(
            f"sampler is {quote(text)}, which is unknown; names have at most {MAX_SAMPLER_CHARS} characters.",
            param="samplers",
            code="unknown_sampler",
        )
    try:
        name, sigma_schedule = resolve_sampler(text)
    except ScheduleError as error:
        raise InvalidRequest(str(error), param="samplers", code="unknown_sampler") from None
    return name if sigma_schedule is None else f"{name} {sigma_schedule}"


def double_looks(first: int, num_prompts: int, max_images: int, name: str = "--max-images") -> tuple[int, ...]:
    """Return seeds per prompt that double from ``first`` as long as a cell has at most ``max_images`` images.

    Raises:
        InvalidRequest: The first look exceeds ``max_images``, which the message calls ``name``.
    """
    if first * num_prompts > max_images:
        raise InvalidRequest(
            f"{name} is {max_images}; {num_prompts} prompts with {first} seeds start with {first * num_prompts} "
            f"images per cell, so give at least {first * num_prompts}.",
            param="max_images",
        )
    looks = [first]
    while first > 0 and 2 * looks[-1] * num_prompts <= max_images:
        looks.append(2 * looks[-1])
    return tuple(looks)


def read_differences(text: str, name: str) -> dict[str, float]:
    """Parse differences of interest such as "exact=5,psnr_db=0.5"; shares of matches are in percentage points.

    Raises:
        InvalidRequest: A measure is unknown, or a difference is not a positive number.
    """
    differences = {}
    for part in split_axis(text, name):
        measure, _, value = (field.strip() for field in part.partition("="))
        if not value:
            message = f"{name} has {quote(part)}; write MEASURE=DIFFERENCE, for example psnr_db=0.5."
            raise InvalidRequest(message, param="detect")
        differences[measure] = numbers(value, name)[0] / (100 if measure == Measure.EXACT.value else 1)
    _check_differences(differences)
    return differences


def _check_differences(differences: Mapping[str, float]) -> None:
    measures = [measure.value for measure in ASSUMED_DEVIATIONS]
    for measure, value in differences.items():
        if measure not in measures:
            raise InvalidRequest(
                f"detect has {quote(measure)}; the measures are {', '.join(measures)}.", param="detect"
            )
        if not 0 < value < math.inf:
            raise InvalidRequest(f"detect has {value:g} for {measure}; give a number above 0.", param="detect")


def _check_range(name: str, value: int, minimum: int, maximum: int | None) -> None:
    if value < minimum or (maximum is not None and value > maximum):
        allowed = f"{minimum} or more" if maximum is None else f"between {minimum} and {maximum}"
        raise InvalidRequest(f"{name} is {str(value)[:40]}; it must be {allowed}.", param=name)
