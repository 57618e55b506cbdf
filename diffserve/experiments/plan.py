"""What a sweep paints: axes, cells, and how much work they are. No torch, no engine, no files.

A cell is one way to paint: sampler, steps, guidance. Every cell paints the same pictures: each prompt with the same
seeds, and so from the same starting latents. Beside the cells stands, for each guidance, the converged reference: the
same pictures by DDIM with ``reference_steps`` steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import MAX_SEED, DiffusionParams, GenerationRequest, ModelInfo
from schedulers import SAMPLERS, ScheduleError, resolve_sampler

DEFAULT_SAMPLERS = ("ddpm", "ddim", "dpmpp_2m")
DEFAULT_STEPS = (5, 10, 20, 50, 100)
DEFAULT_PROMPTS = 64
DEFAULT_SEEDS = 4
REFERENCE_SAMPLER = "ddim"
REFERENCE_STEPS = 200
MAX_PROMPTS = 2_000
MAX_PICTURES = 10_000
MAX_AXIS_VALUES = 100
"""Of samplers, of steps and of guidance, each counted once."""

Place = tuple[int, int]
"""(prompt, seed) by their numbers: what pairs an image with those of other cells."""

MAX_SAMPLER_CHARS = 100
TIMED_ROUNDS = 3
"""How often one image of each cell is painted alone, for its time."""

MAX_AXIS_CHARS = 10_000
MAX_DIGITS = 18
MAX_SHOWN_CHARS = 40


class Cell(msgspec.Struct, frozen=True, order=True):
    """One way to paint: ``sampler`` is canonical, with a sigma schedule after it if it has one."""

    sampler: str
    num_steps: int
    guidance_scale: float
    is_reference: bool = False

    @property
    def label(self) -> str:
        """Sampler and steps, for people."""
        return f"{self.sampler} {self.num_steps}" + (" (converged)" if self.is_reference else "")

    @property
    def slug(self) -> str:
        """The cell as a part of a file name."""
        name = f"{self.sampler.replace(' ', '_')}-{self.num_steps}-g{self.guidance_scale:g}"
        return f"converged-{name}" if self.is_reference else name

    @property
    def rows(self) -> int:
        """UNet rows that an image takes: two an evaluation under guidance (a first or last step may save one)."""
        sampler = SAMPLERS[self.sampler.split()[0]]
        return self.num_steps * sampler.evaluations_per_step * (2 if self.guidance_scale > 1 else 1)


class PlannedImage(msgspec.Struct, frozen=True):
    """One image to paint: of ``cell``, with prompt and seed by their numbers in the plan."""

    cell: Cell
    prompt_index: int
    seed_index: int

    @property
    def place(self) -> Place:
        """What pairs this image with those of other cells."""
        return self.prompt_index, self.seed_index


class SweepPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to compare, and on which pictures.

    samplers         names that a request may use; a sigma schedule may follow
    steps            step counts
    guidance         guidance scales
    prompts          one text for each prompt
    num_seeds        pictures of each prompt
    first_seed       picture s of prompt p has the seed first_seed + p * num_seeds + s, whatever the cell
    reference_steps  DDIM steps of the converged picture; ``None``: nothing is compared with one

    Raises :class:`InvalidRequest` for an axis that is empty or too long, a value out of range, and a sampler that is
    not known.
    """

    samplers: tuple[str, ...]
    steps: tuple[int, ...]
    guidance: tuple[float, ...]
    prompts: tuple[str, ...]
    num_seeds: int = DEFAULT_SEEDS
    first_seed: int = 0
    reference_steps: int | None = REFERENCE_STEPS

    def __post_init__(self) -> None:
        for name in ("samplers", "steps", "guidance", "prompts"):
            if not getattr(self, name):
                raise InvalidRequest(f"{name} is empty; a sweep needs at least one value on every axis.", param=name)
        samplers, steps, guidance = set(self.samplers), set(self.steps), set(self.guidance)
        for name, num in (("samplers", len(samplers)), ("steps", len(steps)), ("guidance", len(guidance))):
            if num > MAX_AXIS_VALUES:
                raise InvalidRequest(f"{name} has {num} values; at most {MAX_AXIS_VALUES} are compared.", param=name)
        _check_range("prompts", len(self.prompts), 1, MAX_PROMPTS)
        _check_range("seeds", self.num_seeds, 1, MAX_PICTURES // len(self.prompts))
        _check_range("seed", self.first_seed, 0, MAX_SEED - len(self.prompts) * self.num_seeds)
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
        """Every cell once: the few steps first, samplers of the same steps side by side."""
        names = [canonical_sampler(text) for text in dict.fromkeys(self.samplers)]
        chosen = product(sorted(set(self.steps)), dict.fromkeys(self.guidance), names)
        return tuple(dict.fromkeys(Cell(name, steps, float(scale)) for steps, scale, name in chosen))

    @property
    def references(self) -> tuple[Cell, ...]:
        """The converged cell of each guidance, if there are any."""
        return tuple(cell for cell in dict.fromkeys(map(self.reference_of, self.cells)) if cell is not None)

    @property
    def all_cells(self) -> tuple[Cell, ...]:
        """What is compared, and the converged cells behind it."""
        return *self.cells, *self.references

    @property
    def places(self) -> tuple[Place, ...]:
        """Every image of a cell."""
        return tuple(product(range(len(self.prompts)), range(self.num_seeds)))

    @property
    def num_images(self) -> int:
        """Images in all, references included."""
        return len(self.places) * len(self.all_cells)

    @property
    def num_painted_rows(self) -> int:
        """UNet rows of all these images."""
        return len(self.places) * sum(cell.rows for cell in self.all_cells)

    @property
    def num_rows(self) -> int:
        """UNet rows in all, the images included that are timed alone."""
        return self.num_painted_rows + TIMED_ROUNDS * sum(cell.rows for cell in self.all_cells)

    def seconds(self, *, row_s: float, image_s: float = 0.0) -> float:
        """How long it takes at ``row_s`` seconds a UNet row, and ``image_s`` to decode and measure an image."""
        return self.num_rows * row_s + self.num_images * image_s

    def reference_of(self, cell: Cell) -> Cell | None:
        """The converged cell that ``cell`` is held against."""
        if self.reference_steps is None:
            return None
        return Cell(REFERENCE_SAMPLER, self.reference_steps, cell.guidance_scale, is_reference=True)

    def seed_of(self, place: Place) -> int:
        """The seed of a picture, the same in every cell; another one for every prompt."""
        return self.first_seed + place[0] * self.num_seeds + place[1]

    def images(self) -> Iterator[PlannedImage]:
        """Everything to paint: references first, then the cells by steps, all samplers of one step count interleaved.

        So a wave of cells batches together, neighbouring waves overlap, and whoever interrupts keeps whole cells.
        """
        waves = [
            self.references,
            *([cell for cell in self.cells if cell.num_steps == n] for n in sorted(set(self.steps))),
        ]
        for wave in waves:
            for place in self.places:
                yield from (PlannedImage(cell, *place) for cell in wave)

    def images_by_place(self) -> Iterator[PlannedImage]:
        """The same, place by place: whoever watches sees images that are compared come about together."""
        return (PlannedImage(cell, *place) for place in self.places for cell in self.all_cells)

    def check(self, info: ModelInfo) -> None:
        """Raise :class:`InvalidRequest` without converged images, and for more steps than ``info``'s model can take."""
        if self.reference_steps is None:
            raise InvalidRequest("reference_steps is missing; a sweep is held against converged images.")
        for name, steps in (("steps", max(self.steps)), ("reference_steps", self.reference_steps)):
            if steps > info.train_timesteps:
                raise InvalidRequest(
                    f"{name} has {steps}; {info.model_id} was trained with {info.train_timesteps} timesteps, so "
                    f"{info.train_timesteps} steps is the most.",
                    param=name,
                )


def canonical_sampler(text: str) -> str:
    """The name of a sampler as cells write it. Raises :class:`InvalidRequest` with the nearest known name."""
    if len(text) > MAX_SAMPLER_CHARS:  # the nearest of a long one would take seconds
        raise InvalidRequest(
            f"sampler is {quote(text)}, which is not known; names have at most {MAX_SAMPLER_CHARS} characters.",
            param="samplers",
            code="unknown_sampler",
        )
    try:
        name, sigma_schedule = resolve_sampler(text)
    except ScheduleError as error:
        raise InvalidRequest(str(error), param="samplers", code="unknown_sampler") from None
    return name if sigma_schedule is None else f"{name} {sigma_schedule}"


def _check_range(name: str, value: int, least: int, most: int | None) -> None:
    if value < least or (most is not None and value > most):
        reach = f"{least} or more" if most is None else f"between {least} and {most}"
        raise InvalidRequest(f"{name} is {str(value)[:40]}; it must be {reach}.", param=name)


def split_axis(text: str, name: str) -> tuple[str, ...]:
    """The values of an axis written with commas. Raises :class:`InvalidRequest` where one is missing, and for more than
    ``MAX_AXIS_CHARS`` characters."""
    if len(text) > MAX_AXIS_CHARS:
        raise InvalidRequest(f"{name} has {len(text)} characters; at most {MAX_AXIS_CHARS} are read.", param=name)
    values = tuple(part.strip() for part in text.split(","))
    if not all(values):
        what = "is empty" if not any(values) else f"is {quote(text)}, which leaves a value out"
        raise InvalidRequest(f"{name} {what}; write values with commas between them.", param=name)
    return values


def whole_numbers(text: str, name: str) -> tuple[int, ...]:
    """An axis of whole numbers of at most ``MAX_DIGITS``: "5,10,20". Raises :class:`InvalidRequest` for anything
    else."""
    values = split_axis(text, name)
    for value in values:
        digits = value.removeprefix("-")
        if not digits.isdecimal():
            raise InvalidRequest(f"{name} has {quote(value)}, which is not a whole number.", param=name)
        if len(digits) > MAX_DIGITS:
            raise InvalidRequest(
                f"{name} has {quote(value)} of {len(digits)} digits; at most {MAX_DIGITS} are read.", param=name
            )
    return tuple(int(value) for value in values)


def numbers(text: str, name: str) -> tuple[float, ...]:
    """An axis of numbers: "1,3,7.5". Raises :class:`InvalidRequest` for anything else."""
    return tuple(_number(value, name) for value in split_axis(text, name))


def _number(value: str, name: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidRequest(f"{name} has {quote(value)}, which is not a number.", param=name) from None


def quote(text: str) -> str:
    """The beginning of ``text`` in quotes."""
    return repr(text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…")
