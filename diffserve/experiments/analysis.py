"""Computes measures with confidence intervals from the records of a sweep, using only numpy.

The bootstrap resamples prompts. All images of a prompt stay together across cells, so differences between cells are
paired, which makes their intervals narrower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from diffserve.experiments.estimates import SET_MEASURES, Estimate, Measure
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
)
from diffserve.experiments.plan import Cell, Place, SweepPlan
from diffserve.experiments.records import ImageRecord, features_of

LEAST_PROMPTS = 8
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
    """Estimates of measures over the records of a sweep in which every cell is complete.

    Args:
        plan: The plan of the sweep.
        records: Records by cell and place.
        drawn: Features of rendered scenes of every prompt, ``None`` if the prompts cannot be rendered.
        set_values: Distances between sets, computed by the metrics library.
        seed_spread: Latent RMSE between converged images of one prompt and two seeds, by guidance.
        places: Places to include, by default all of the plan.
        least_groups: Minimum number of prompts, or of seeds of a single prompt, for means to have an interval.
    """

    def __init__(
        self,
        plan: SweepPlan,
        records: Mapping[Cell, Mapping[Place, ImageRecord]],
        drawn: PictureSet | None = None,
        set_values: SetValues | None = None,
        seed_spread: Mapping[float, float] | None = None,
        *,
        places: Sequence[Place] | None = None,
        least_groups: int = 1,
    ) -> None:
        places = plan.places if places is None else places
        self.plan = plan
        self.seed_spread = dict(seed_spread or {})
        self._records = {cell: [cell_records[place] for place in places] for cell, cell_records in records.items()}
        self._drawn = drawn
        self._set_values = dict(set_values or {})
        self._prompts = [place[0] for place in places]
        self._groups = self._prompts if len(set(self._prompts)) > 1 else None
        self._has_intervals = len(set(self._groups or places)) >= least_groups
        self._times = resamples(len(plan.prompts))
        self._replicates: dict[tuple[Cell, Measure], Floats] = {}
        self._sets: dict[Cell, PictureSet] = {}

    def records(self, cell: Cell) -> list[ImageRecord]:
        """Return the cell's records in the order of the places."""
        return self._records[cell]

    def values(self, cell: Cell, measure: Measure) -> Floats | None:
        """Return a measure of each image, (N,), in the order of the places, or ``None`` if some image lacks it."""
        records = self._records[cell]
        if measure is Measure.EXACT:
            optional_values = [record.parts.exact if record.parts else None for record in records]
        else:
            optional_values = [
                getattr(record.distance, measure.value) if record.distance else None for record in records
            ]
        values = [value for value in optional_values if value is not None]
        return np.array(values, dtype=np.float64) if len(values) == len(records) else None

    def estimate(self, cell: Cell, measure: Measure) -> Estimate | None:
        """Return the estimate of a cell's measure, or ``None`` if it was not measured."""
        if measure is Measure.EXACT and (hits := self.values(cell, measure)) is not None:
            share = share_of([bool(hit) for hit in hits], self._groups)
            return Estimate(share.share, share.low, share.high) if self._has_intervals else Estimate(share.share)
        return self.contrast({cell: 1}, measure)

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
        parts = [(weight, self.values(cell, measure)) for cell, weight in weights.items()]
        if any(values is None for _, values in parts):
            return None
        summed: Floats = np.sum([weight * values for weight, values in parts if values is not None], axis=0)
        if not self._has_intervals:
            return Estimate(float(summed.mean()))
        return Estimate(float(summed.mean()), *bootstrap_interval(summed.tolist(), self._groups))

    def picture_set(self, cell: Cell) -> PictureSet:
        """Return the features of a cell's images."""
        if cell not in self._sets:
            features = features_of(self._records[cell])
            self._sets[cell] = PictureSet(features, self._prompts, len(self.plan.prompts))
        return self._sets[cell]

    def reference_set(self, cell: Cell, measure: Measure) -> PictureSet | None:
        """Return the reference set for a set distance of ``cell``, or ``None`` if there is none.

        KID to converged images is used only if no scenes can be rendered: KID assumes independent sets, and these share
        their seeds.
        """
        if measure in (Measure.FRECHET, Measure.KID):
            return self._drawn
        if measure is Measure.KID_CONVERGED and self._drawn is not None:
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
