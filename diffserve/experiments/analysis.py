"""From the records of a sweep to measures with intervals, of one cell or of any paired difference. numpy alone.

The unit that is resampled is the prompt: its pictures in all cells stay together, so that differences between cells are
paired and their intervals are as narrow as pairing makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from diffserve.experiments.estimates import SET_MEASURES, Estimate, Measure
from diffserve.experiments.intervals import bootstrap_interval, share_of
from diffserve.experiments.plan import Cell, Place, SweepPlan
from diffserve.experiments.records import ImageRecord, features_of
from diffserve.experiments.set_bootstrap import (
    Floats,
    KernelSums,
    Moments,
    frechet_replicates,
    kernel_replicates,
    reference_roots,
    resamples,
)

LEAST_PROMPTS = 8
"""With fewer, resampled sets of pictures say nothing of the spread, and distances between sets have no interval."""

SetValues = Mapping[tuple[Cell, Measure], float]
"""The distances themselves, by the metrics library; see :mod:`diffserve.experiments.metrics.set_distance`."""


@dataclass(eq=False)
class PictureSet:
    """Features of a set of pictures by prompt, and what the bootstrap needs of them."""

    features: NDArray[np.float32]
    prompts: list[int]
    num_prompts: int

    @cached_property
    def moments(self) -> Moments:
        return Moments.of(self.features, self.prompts, self.num_prompts)

    @cached_property
    def kernel(self) -> KernelSums:
        return KernelSums.of(self.features, self.prompts, self.num_prompts)


class Analysis:
    """Records of a sweep, cell by cell and place by place, every cell complete.

    drawn         features of the drawn scenes of every prompt, ``None`` where prompts cannot be drawn
    set_values    the distances between sets, from the metrics library
    seed_spread   by guidance, how far apart converged pictures of one prompt and two seeds are (latent RMSE)
    places        what is looked at, all of the plan's unless said otherwise
    least_groups  of fewer prompts, or seeds of an only one, means have no interval
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
        self._records = {cell: [known[place] for place in places] for cell, known in records.items()}
        self._drawn = drawn
        self._set_values = dict(set_values or {})
        self._prompts = [place[0] for place in places]
        self._groups = self._prompts if len(set(self._prompts)) > 1 else None
        self._has_intervals = len(set(self._groups or places)) >= least_groups
        self._times = resamples(len(plan.prompts))
        self._replicates: dict[tuple[Cell, Measure], Floats] = {}
        self._roots: dict[int, list[tuple[Floats, Floats]]] = {}
        self._sets: dict[Cell, PictureSet] = {}

    def records(self, cell: Cell) -> list[ImageRecord]:
        """The cell's records, in the order of the places."""
        return self._records[cell]

    def values(self, cell: Cell, measure: Measure) -> Floats | None:
        """A measure of each picture, (N,), in the order of the places; ``None`` where it was not measured."""
        records = self._records[cell]
        if measure is Measure.EXACT:
            known = [record.parts.exact if record.parts else None for record in records]
        else:
            known = [getattr(record.distance, measure.value) if record.distance else None for record in records]
        found = [value for value in known if value is not None]
        return np.array(found, dtype=np.float64) if len(found) == len(records) else None

    def estimate(self, cell: Cell, measure: Measure) -> Estimate | None:
        """The measure of a cell; ``None`` where it was not measured."""
        if measure is Measure.EXACT and (hits := self.values(cell, measure)) is not None:
            share = share_of([bool(hit) for hit in hits], self._groups)
            return Estimate(share.share, share.low, share.high) if self._has_intervals else Estimate(share.share)
        return self.contrast({cell: 1}, measure)

    def contrast(self, weights: Mapping[Cell, float], measure: Measure) -> Estimate | None:
        """The sum of weight times measure over cells, paired: {a: 1, b: -1} is the difference of a and b.

        ``None`` where one of the cells lacks the measure.
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
        """The features of a cell's pictures."""
        if cell not in self._sets:
            features = features_of(self._records[cell])
            self._sets[cell] = PictureSet(features, self._prompts, len(self.plan.prompts))
        return self._sets[cell]

    def reference_set(self, cell: Cell, measure: Measure) -> PictureSet | None:
        """What a distance between sets holds ``cell`` against; ``None`` where there is nothing.

        KID to converged pictures is a stopgap where nothing can be drawn: it takes sets to be independent, and these
        share their seeds.
        """
        if measure in (Measure.FRECHET, Measure.KID):
            return self._drawn
        if measure is Measure.KID_CONVERGED and self._drawn is not None:
            return None
        converged = None if cell.is_reference else self.plan.reference_of(cell)
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
            reference, own = self.reference_set(cell, measure), self.picture_set(cell)
            assert reference is not None, "a distance between sets needs both"
            if measure in (Measure.FRECHET, Measure.FRECHET_CONVERGED):
                found = frechet_replicates(own.moments, self._roots_of(reference), self._times)
            else:
                other = (reference.features, reference.prompts)
                between = KernelSums.of(own.features, own.prompts, own.num_prompts, other)
                found = kernel_replicates(own.kernel, between, reference.kernel, self._times)
            self._replicates[cell, measure] = found
        return self._replicates[cell, measure]

    def _roots_of(self, reference: PictureSet) -> list[tuple[Floats, Floats]]:
        if id(reference) not in self._roots:
            self._roots[id(reference)] = reference_roots(reference.moments, self._times)
        return self._roots[id(reference)]
