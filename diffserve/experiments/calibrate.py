"""Measures the front of quality against time of a model with an engine, within a time budget.

1. One image with each saving is generated alone and timed, from which the time of every candidate is estimated.
   Savings that save no time are dropped.
2. Candidates and converged images are generated for a few prompts, which gives the PSNR of each candidate.
3. The cells of the front, with and without learned samplers, are timed again in several rounds.
4. If the prompts can be checked, those of them that take at most half of the time of the closest one are compared with
   it in the exact match of further prompts with several seeds.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Final

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.experiments import provenance
from diffserve.experiments.analysis import Analysis
from diffserve.experiments.axes import Settings
from diffserve.experiments.calibration import Calibration, CellPlan, MeasuredCell, front
from diffserve.experiments.engine_generator import EngineGenerator, request_for, time_alone
from diffserve.experiments.estimates import Measure
from diffserve.experiments.generation import complete, generate_measured
from diffserve.experiments.measure import ImageMeasures, PromptCheck
from diffserve.experiments.plan import REFERENCE_STEPS, Cell, Place, canonical_sampler
from diffserve.experiments.power import DIFFERENCES
from diffserve.experiments.records import FinishedImage, GenerationEvent, ImageRecord, StoredImage
from diffserve.experiments.verdicts import LEAST_SEEDS, compare_cells
from diffserve.models.learned_samplers import LearnedSamplers
from diffserve.version import __version__
from schedulers import SAMPLERS
from schedulers.learned import is_learned

if TYPE_CHECKING:
    from diffserve.engine import Engine

CANDIDATES: Final = ("ddim", "dpmpp_2m", "dpmpp_2m karras", "unipc")
"""Samplers without fresh noise; samplers with it do not approach the converged image of the same noise."""

STEPS: Final = (4, 6, 8, 12, 18, 27, 40, 60)
SAVING_SAMPLER: Final = "unipc"
SAVINGS: Final[tuple[Settings, ...]] = ((("cache_interval", 2),), (("guidance_interval", "0-0.7"),))
LEAST_SAVING_STEPS: Final = 8
"""Savings are tried from this number of steps on; with fewer, steps are the better saving."""

FEW_STEPS: Final = 8
"""Models with at most this number of default steps were distilled and have no converged image."""

SCREENED_AT_ONCE: Final = 4
MAX_SCREENED: Final = 32
SCREEN_SHARE: Final = 0.35
"""Part of the budget after which screening ends if exact match is measured, too."""

PROBED_STEPS: Final = 12
"""Steps of the cells that are timed first; the time of the others follows from their UNet rows."""

TIMED_ROUNDS: Final = 5
LEAST_SAVED: Final = 0.1
"""Share of the time that a saving must save to be screened."""

PROMPTS_AT_ONCE: Final = 4
CHECKED_SHARE: Final = 0.5
"""Cells that take more than this share of the time of the closest one are no candidates for ``auto``."""

MARGIN: Final = DIFFERENCES[Measure.EXACT.value]

OnProgress = Callable[[str, int, int], None]
"""Receives the phase, the images that it has finished, and the largest number of images that it may need."""


@dataclass
class _Images:
    """Records by cell and place, and converged images, in memory."""

    by_cell: defaultdict[Cell, dict[Place, ImageRecord]] = field(default_factory=lambda: defaultdict(dict))
    converged: dict[tuple[Cell, Place], StoredImage] = field(default_factory=dict)

    def save(self, finished: FinishedImage) -> None:
        """Keep a converged image."""
        if finished.image.cell.is_reference:
            key = finished.image.cell, finished.image.place
            self.converged[key] = StoredImage(finished.pixels, finished.latents)

    def load(self, cell: Cell, place: Place) -> StoredImage | None:
        """Return a converged image."""
        return self.converged.get((cell, place))

    def records(self, cell: Cell) -> Mapping[Place, ImageRecord]:
        """Return the records of a cell."""
        return self.by_cell[cell]

    def add(self, cell: Cell, record: ImageRecord) -> None:
        """Keep a record."""
        self.by_cell[cell][record.place] = record


def candidates(engine: Engine, prompt: str) -> list[Cell]:
    """Return the cells to try: those that the model accepts, and its learned samplers.

    Raises:
        InvalidRequest: The model was distilled for few steps.
    """
    info = engine.info
    default = canonical_sampler(info.default_sampler)
    if info.default_num_steps <= FEW_STEPS:
        raise InvalidRequest(
            f"{info.model_id} uses {info.default_num_steps} steps by default; a few-step model has no converged images "
            "to compare with, so its quality words keep shares of these steps.",
            param="model",
        )
    scale = info.default_guidance_scale
    names = CANDIDATES if SAMPLERS[default.split()[0]].stochastic else tuple(dict.fromkeys((*CANDIDATES, default)))
    cells = [Cell(name, steps, scale) for steps in STEPS for name in names]
    cells += [
        Cell(SAVING_SAMPLER, steps, scale, settings=settings)
        for settings in SAVINGS
        if settings[0][0] != "guidance_interval" or scale > 1
        for steps in STEPS
        if steps >= LEAST_SAVING_STEPS
    ]
    learned = LearnedSamplers.of(info).usable()
    cells += [Cell(name, each.num_rows, scale) for name, each in learned.items() if each.guidance_scale == scale]
    return [cell for cell in cells if is_accepted(engine, cell, prompt)]


def is_accepted(engine: Engine, cell: Cell, prompt: str) -> bool:
    """Return whether the model can run ``cell``."""
    try:
        engine.check(request_for(CellPlan.of([cell], [prompt]), cell, (0, 0)))
    except InvalidRequest:
        return False
    return True


def calibrate(
    engine: Engine,
    prompts: Sequence[str],
    *,
    minutes: float,
    num_seeds: int = LEAST_SEEDS,
    first_seed: int = 0,
    cells: Sequence[Cell] | None = None,
    reference_steps: int = REFERENCE_STEPS,
    on_note: Callable[[str], None] = lambda _: None,
    on_progress: OnProgress = lambda _phase, _done, _total: None,
) -> Calibration:
    """Measure candidates for about ``minutes`` and return what their quality profile follows from.

    Args:
        engine: The engine, not used elsewhere meanwhile.
        prompts: Prompts; the budget may not suffice for all of them.
        minutes: Budget. At least ``SCREENED_AT_ONCE`` prompts are screened and ``PROMPTS_AT_ONCE`` are checked.
        num_seeds: Images per prompt of the exact match.
        first_seed: Seed of the first image.
        cells: The cells to try; None: :func:`candidates`.
        reference_steps: DDIM steps of the converged images.
        on_note: Called with a sentence after each phase.
        on_progress: Called often; it may raise KeyboardInterrupt.

    Raises:
        InvalidRequest: The model was distilled for few steps, or fewer than ``LEAST_SEEDS`` seeds are given.
    """
    if num_seeds < LEAST_SEEDS:
        raise InvalidRequest(f"seeds is {num_seeds}; verdicts need at least {LEAST_SEEDS} per prompt.", param="seeds")
    started_s = time.monotonic()
    deadline_s = started_s + 60 * minutes
    cells = candidates(engine, prompts[0]) if cells is None else cells
    check = PromptCheck(engine.info.family, prompts)
    engine.warm_up()
    estimated_s = _estimate(engine, cells, prompts[0], first_seed, on_progress)
    cells = [cell for cell in cells if _saves_time(cell, estimated_s)]
    screen_end_s = deadline_s if check.wishes is None else started_s + SCREEN_SHARE * 60 * minutes
    num_screened = min(len(prompts), len(prompts) if check.wishes is None else MAX_SCREENED)
    plan = CellPlan.of(
        cells, prompts[:num_screened], num_seeds=1, first_seed=first_seed, reference_steps=reference_steps
    )
    images = _generate(engine, plan, check, SCREENED_AT_ONCE, screen_end_s, partial(on_progress, "screening"))
    num_screened = len(images.records(cells[0]))
    screened = [_screened(cell, estimated_s[cell], images.records(cell).values()) for cell in cells]
    finalists = _finalists(screened)
    on_note(f"screened {len(cells)} on {num_screened} images; {len(finalists)} are on the front")
    seconds = _time(engine, [each.cell for each in finalists], prompts[0], first_seed, on_progress)
    timed = [msgspec.structs.replace(each, seconds=seconds[each.cell]) for each in finalists]
    finalists = _finalists(timed)
    num_prompts = 0
    if check.wishes is not None:
        best = max(finalists, key=lambda each: each.psnr_db)
        fast = [each.cell for each in finalists if each.seconds <= CHECKED_SHARE * best.seconds]
        measured = [*fast, best.cell]
        plan = CellPlan.of(measured, prompts, num_seeds=num_seeds, first_seed=first_seed, reference_steps=None)
        images = _generate(engine, plan, check, PROMPTS_AT_ONCE, deadline_s, partial(on_progress, "checking"))
        num_prompts = len(images.records(measured[0])) // num_seeds
        analysis = Analysis(plan, {cell: images.records(cell) for cell in measured})
        comparisons = {each.cell: each for each in compare_cells(analysis, [Measure.EXACT])}
        finalists = [
            msgspec.structs.replace(
                each,
                exact=analysis.estimate(each.cell, Measure.EXACT) if each.cell in measured else None,
                difference=comparisons[each.cell].difference if each.cell in comparisons else None,
                verdict=comparisons[each.cell].verdict if each.cell in comparisons else "",
            )
            for each in finalists
        ]
        on_note(f"checked {num_prompts} prompts with {num_seeds} seeds")
    return Calibration(
        model=engine.info.model_id,
        digest=engine.info.digest,
        guidance_scale=engine.info.default_guidance_scale,
        measured_on=_measured_on(engine),
        reference=f"DDIM with {reference_steps} steps",
        num_screened=num_screened,
        num_prompts=num_prompts,
        num_seeds=num_seeds if num_prompts else 1,
        margin=MARGIN,
        why_not=check.why_not or "",
        cells=tuple(finalists),
        screened=tuple(sorted(screened, key=lambda each: each.seconds)),
    )


def _finalists(cells: Sequence[MeasuredCell]) -> list[MeasuredCell]:
    """Return the front of all cells and that of the cells without learned samplers, the fastest first."""
    fronts = [*front(cells), *front(cell for cell in cells if not is_learned(cell.cell.sampler))]
    return sorted({each.cell: each for each in fronts}.values(), key=lambda each: each.seconds)


def _estimate(
    engine: Engine, cells: Sequence[Cell], prompt: str, seed: int, on_progress: OnProgress
) -> dict[Cell, float]:
    """Return the estimated seconds of an image of each cell: those of a timed cell with the same settings, by rows."""
    probes = {
        cell.settings: cell for cell in sorted(cells, key=lambda cell: -abs(cell.num_steps - PROBED_STEPS))
    }  # of each settings the one that is nearest to PROBED_STEPS
    seconds = _time(engine, list(probes.values()), prompt, seed, on_progress)
    per_row = {settings: seconds[cell] / cell.rows for settings, cell in probes.items()}
    return {cell: cell.rows * per_row[cell.settings] for cell in cells}


def _saves_time(cell: Cell, seconds: Mapping[Cell, float]) -> bool:
    """Return whether the settings of ``cell`` save time; True if there is no such cell without them."""
    plain = msgspec.structs.replace(cell, settings=())
    return plain == cell or seconds[cell] <= (1 - LEAST_SAVED) * seconds.get(plain, math.inf)


def _screened(cell: Cell, seconds: float, records: Iterable[ImageRecord]) -> MeasuredCell:
    values = [record.distance.psnr_db for record in records if record.distance is not None]
    return MeasuredCell(cell=cell, seconds=seconds, psnr_db=fmean(value for value in values if value is not None))


def _time(engine: Engine, cells: Sequence[Cell], prompt: str, seed: int, on_progress: OnProgress) -> dict[Cell, float]:
    """Return the seconds of an image of each cell alone: the shortest of ``TIMED_ROUNDS`` rounds over all cells.

    Other programs make a round slower but never faster, so the shortest one is the least disturbed.
    """
    plan = CellPlan.of(cells, [prompt], num_seeds=1, first_seed=seed, reference_steps=None)
    total, numbers = TIMED_ROUNDS * len(cells), itertools.count(1)
    times = time_alone(
        engine, plan, plan.all_cells, lambda _: on_progress("timing", next(numbers), total), TIMED_ROUNDS
    )
    return {cell: min(each.image_s) for cell, each in times.items()}


def _generate(
    engine: Engine,
    plan: CellPlan,
    check: PromptCheck,
    at_once: int,
    end_s: float,
    on_progress: Callable[[int, int], None],
) -> _Images:
    """Generate all cells of the plan for ``at_once`` prompts at a time, until the monotonic time ``end_s``."""
    images, measures, total, num_done = _Images(), ImageMeasures(check), plan.num_images, 0

    def note(event: GenerationEvent) -> None:
        nonlocal num_done
        num_done += isinstance(event, FinishedImage)
        on_progress(num_done, total)

    for first in range(0, len(plan.prompts), at_once):
        if first and time.monotonic() > end_s:
            break
        indices = range(first, first + at_once)
        chunk = [image for image in plan.images() if image.prompt_index in indices]
        complete(generate_measured(plan, EngineGenerator(engine, plan), measures, images, chunk, note))
    return images


def _measured_on(engine: Engine) -> str:
    machine, info = provenance.machine(), engine.info
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {info.dtype} on {info.device}, diffserve {__version__}, "
        f"{provenance.now()}"
    )
