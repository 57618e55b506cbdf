"""How many steps each sampler needs on a model, as a sweep measured it: ``fewest_steps.json`` in the model's directory.

Written from the report of a sweep by ``python -m diffserve.training.fewest_steps``; a model without such a file has not
been measured, and nobody is warned.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from diffserve.models.vocabulary import read_beside

FEWEST_STEPS_FILE = "fewest_steps.json"


class FewestSteps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured.

    digest  of the model that painted
    most    steps, the highest count that was tried
    steps   sampler, with a sigma schedule after it if it has one -> from how many steps on it paints this model's
            pictures right; ``None``: at no count tried
    """

    digest: str
    most: int
    steps: dict[str, int | None]

    def warning(self, sampler: str, sigma_schedule: str | None, num_steps: int) -> str | None:
        """What to tell somebody who asks for ``num_steps`` of ``sampler``; ``None`` where they are enough."""
        name = f"{sampler} {sigma_schedule}" if sigma_schedule else sampler
        if name not in self.steps or num_steps > self.most:
            return None
        fewest = self.steps[name]
        if fewest is None:
            return f"{name} was not found to paint this model's pictures right, up to {self.most} steps; take another."
        if num_steps < fewest:
            count = f"1 step of {name} is" if num_steps == 1 else f"{num_steps} steps of {name} are"
            return f"{count} few for this model: its pictures come out right from {fewest} on."
        return None


def read_fewest_steps(directory: Path) -> FewestSteps | None:
    """What ``fewest_steps.json`` in ``directory`` says; ``None`` where there is none. Raises ModelLoadError."""
    return read_beside(directory / FEWEST_STEPS_FILE, FewestSteps)
