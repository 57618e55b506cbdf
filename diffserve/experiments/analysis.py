"""Computes measures with confidence intervals from the records of a sweep, using only numpy.

The bootstrap resamples prompts. All images of a prompt stay together across cells, so differences between cells are
paired, which makes their intervals narrower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from diffserve.experiments.estimates import PROMPT_MEASURES, SET_MEASURES, CheckerError, Estimate, Measure
from diffserve.experiments.intervals import (
    Floats,
    KernelSums,
    Moments,
    bootstrap_interval,
    frechet_replicates,
    kernel_replicates,
    reference_roots,
    resamples,
    share_of,
    widen_equal,
)
from diffserve.experiments.plan import Cell, Place, SweepPlan, Target
from diffserve.experiments.power import LEAST_UNITS, Z_LEVEL, look_bounds, mean_interval, unit_means
from diffserve.experiments.records import ImageRecord, features_of

LEAST_PROMPTS = 16
"""Minimum number of prompts for an interval of a set distance; fewer give no useful bootstrap estimate."""

SetValues = Mapping[tuple[Cell, Measure], float]
"""Set distances by cell and measure; see :mod:`diffserve.experiments.metrics.set_distance`."""


@dataclass(eq=False)
class PictureSet:
    """Features of a set of images, the prompt index of each image, and cached sums for the bootstrap."""

    features: NDArray[np.float32]
    prompts: list[int]
    num_prompts: int

    @cached_property
    def moments(self) -> Moments:
        """Moments of the features, for Frechet distances."""
        return Moments.of(self.features, self.prompts, self.num_prompts)

    @cached_property
    def roots(self) -> list[tuple[Floats, Floats]]:
        """Mean and covariance root of each resample, for Frechet distances to this set."""
        return reference_roots(self.moments, resamples(self.num_prompts))

    @cached_property
    def kernel(self) -> KernelSums:
        """Kernel sums of the features, for the maximum mean discrepancy."""
        return KernelSums.of(self.features, self.prompts, self.num_prompts)


class Analysis:
    """Estimates of measures over the records of a sweep.

    Means use all images of a cell, differences the places that the cells share, and distances between sets the places
    that all cells share, because these distances depend on the number of images.

    Args:
        plan: The plan of the sweep.
        records: Records by cell and place.
        drawn: Features of rendered scenes of every prompt, ``None`` if the prompts cannot be rendered.
        set_values: Distances between sets, computed by the metrics library.
        seed_spread: Latent RMSE between converged images of one prompt and two seeds, by target.
        places: Places to include if they are recorded, by default all of the plan.
        checker: The checker's own error; ``None`` if prompts cannot be checked.
        undrawn: Cells whose images are not compared with rendered scenes, because their model generates other ones.
    """

    def __init__(
        self,
        plan: SweepPlan,
        records: Mapping[Cell, Mapping[Place, ImageRecord]],
        drawn: PictureSet | None = None,
        set_values: SetValues | None = None,
        seed_spread: Mapping[Target, float] | None = None,
        *,
        places: Sequence[Place] | None = None,
        checker: CheckerError | None = None,
        undrawn: Collection[Cell] = (),
    ) -> None:
        places = plan.places if places is None else places
        self.plan = plan
        self.checker = checker
        self.seed_spread = dict(seed_spread or {})
        self._records = {
            cell: {place: cell_records[place] for place in places if place in cell_records}
            for cell, cell_records in records.items()
        }
        self._drawn = drawn
        self._undrawn = undrawn
        self._set_values = dict(set_values or {})
        self._common = self.shared_places(self._records)
        self._times = resamples(len(plan.prompts))
        self._replicates: dict[tuple[Cell, Measure], Floats] = {}
        self._sets: dict[Cell, PictureSet] = {}

    def records(self, cell: Cell) -> list[ImageRecord]:
        """Return the cell's records in the order of the places."""
        return list(self._records[cell].values())

    def record(self, cell: Cell, place: Place) -> ImageRecord | None:
        """Return the record of an image, or ``None`` if there is none."""
        return self._records[cell].get(place)

    def shared_places(self, cells: Iterable[Cell]) -> tuple[Place, ...]:
        """Return the places that all ``cells`` have images of, in the order of the plan."""
        records = [self._records[cell] for cell in cells]
        first = records[0] if records else {}
        return tuple(place for place in first if all(place in other for other in records))

    def num_seeds(self, cells: Iterable[Cell]) -> int:
        """Return the smallest number of seeds of a prompt among the places that all ``cells`` share."""
        return min(Counter(prompt for prompt, _ in self.shared_places(cells)).values(), default=0)

    def num_units(self, cells: Iterable[Cell]) -> int:
        """Return the number of units of a difference: the prompts, or the seeds of a single prompt."""
        return len(set(self._groups(self.shared_places(cells))))

    def values(self, cell: Cell, measure: Measure, places: Sequence[Place] | None = None) -> Floats | None:
        """Return a measure of each image, (N,), in the order of the places, or ``None`` if some image lacks it."""
        records = self.records(cell) if places is None else [self._records[cell][place] for place in places]
        optional_values: Sequence[float | None]
        if measure is Measure.EXACT:
            optional_values = [record.parts.exact if record.parts else None for record in records]
        elif measure in PROMPT_MEASURES:
            optional_values = [record.scores.get(measure.value) for record in records]
        else:
            optional_values = [
                getattr(record.distance, measure.value) if record.distance else None for record in records
            ]
        values = [value for value in optional_values if value is not None]
        return np.array(values, dtype=np.float64) if len(values) == len(records) else None

    def estimate(self, cell: Cell, measure: Measure) -> Estimate | None:
        """Return the estimate of a cell's measure, or ``None`` if it was not measured."""
        if measure is Measure.EXACT and (hits := self.values(cell, measure)) is not None:
            groups = self._groups(self.shared_places((cell,)))
            share = share_of([bool(hit) for hit in hits], groups)
            return Estimate(share.share, share.low, share.high)
        return self.contrast({cell: 1}, measure)

    def paired_values(self, cells: Iterable[Cell], measure: Measure) -> list[Floats] | None:
        """Return a measure of the images of each cell at the places that all share, or ``None`` if one lacks it."""
        cells = tuple(cells)
        places = self.shared_places(cells)
        values = [self.values(cell, measure, places) for cell in cells]
        complete = [cell_values for cell_values in values if cell_values is not None]
        return complete if len(complete) == len(values) else None

    def contrast(self, weights: Mapping[Cell, float], measure: Measure) -> Estimate | None:
        """Estimate a weighted sum of a measure over cells, paired by image.

        Args:
            weights: Weight of each cell; ``{a: 1, b: -1}`` is the difference between a and b.
            measure: The measure to sum.

        Returns:
            The estimate, or ``None`` if one of the cells lacks the measure.
        """
        if measure in SET_MEASURES:
            return self._set_contrast(weights, measure)
        values = self.paired_values(weights, measure)
        if values is None:
            return None
        summed: Floats = np.sum([weight * part for weight, part in zip(weights.values(), values, strict=True)], axis=0)
        mean, groups = float(summed.mean()), self._groups(self.shared_places(weights))
        if len(weights) > 1:
            low, high = mean_interval(summed, groups, self._bound(weights) or Z_LEVEL)
        else:
            low, high = bootstrap_interval(summed.tolist(), groups)
        if measure is Measure.EXACT and len(weights) > 1:
            low, high = widen_equal(low, high, len(set(groups)))
        return Estimate(mean, low, high)

    def deviation(self, cells: tuple[Cell, Cell], measure: Measure) -> float | None:
        """Return the standard deviation of the units' mean differences between two cells; see ``power``.

        Returns:
            The deviation, or ``None`` for distances between sets, a missing measure, fewer than 3 units, or shares of
            matches without any difference, which do not show how often one occurs.
        """
        values = None if measure in SET_MEASURES else self.paired_values(cells, measure)
        groups = self._groups(self.shared_places(cells))
        if values is None or len(set(groups)) < LEAST_UNITS:
            return None
        differences = unit_means(values[0] - values[1], groups)
        return None if measure is Measure.EXACT and not differences.any() else float(differences.std(ddof=1))

    def _bound(self, weights: Mapping[Cell, float]) -> float | None:
        """Return the bound of the last look at a difference of cells, ``None`` if there is a single look."""
        looks, num_seeds = self.plan.looks, self.num_seeds(weights)
        if len(looks) < 2 or len(weights) < 2:
            return None
        return look_bounds(looks)[max(sum(look <= num_seeds for look in looks) - 1, 0)]

    def _groups(self, places: Sequence[Place]) -> list[Place]:
        """Return the bootstrap group of each place: its prompt, or for a single prompt the place itself."""
        several = len({prompt for prompt, _ in places}) > 1
        return [(prompt, 0) for prompt, _ in places] if several else list(places)

    def picture_set(self, cell: Cell) -> PictureSet:
        """Return the features of a cell's images at the places that all cells share."""
        if cell not in self._sets:
            features = features_of([self._records[cell][place] for place in self._common])
            prompts = [prompt for prompt, _ in self._common]
            self._sets[cell] = PictureSet(features, prompts, len(self.plan.prompts))
        return self._sets[cell]

    def reference_set(self, cell: Cell, measure: Measure) -> PictureSet | None:
        """Return the reference set for a set distance of ``cell``, or ``None`` if there is none.

        KID to converged images is used only if no scenes can be rendered: KID assumes independent sets, and these share
        their seeds.
        """
        drawn = None if cell in self._undrawn else self._drawn
        if measure in (Measure.FRECHET, Measure.KID):
            return drawn
        if measure is Measure.KID_CONVERGED and drawn is not None:
            return None
        converged = self.plan.reference_of(cell)
        return None if converged is None else self.picture_set(converged)

    def _set_contrast(self, weights: Mapping[Cell, float], measure: Measure) -> Estimate | None:
        if any((cell, measure) not in self._set_values for cell in weights):
            return None
        value = sum(weight * self._set_values[cell, measure] for cell, weight in weights.items())
        if len(self.plan.prompts) < LEAST_PROMPTS:
            return Estimate(value)
        replicates: Floats = np.sum([w * self._set_replicates(cell, measure) for cell, w in weights.items()], axis=0)
        low, high = np.quantile(replicates - replicates.mean(), [0.025, 0.975]) + value
        if (bound := self._bound(weights)) is not None:
            low, high = value - bound * replicates.std(), value + bound * replicates.std()
        if len(weights) == 1 and measure in (Measure.FRECHET, Measure.FRECHET_CONVERGED):
            low = max(0.0, low)
        return Estimate(value, float(low), float(high))

    def _set_replicates(self, cell: Cell, measure: Measure) -> Floats:
        if (cell, measure) not in self._replicates:
            reference, images = self.reference_set(cell, measure), self.picture_set(cell)
            assert reference is not None, "a distance between sets needs both"
            if measure in (Measure.FRECHET, Measure.FRECHET_CONVERGED):
                replicates = frechet_replicates(images.moments, reference.roots, self._times)
            else:
                other = (reference.features, reference.prompts)
                between = KernelSums.of(images.features, images.prompts, images.num_prompts, other)
                replicates = kernel_replicates(images.kernel, between, reference.kernel, self._times)
            self._replicates[cell, measure] = replicates
        return self._replicates[cell, measure]
