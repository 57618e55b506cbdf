"""Minimum number of steps of each sampler on a model: ``fewest_steps.json`` in the model directory.

``python -m diffserve.training.fewest_steps`` writes the file from the report of a sweep. A model without the file
produces no warnings.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from diffserve.models.vocabulary import read_model_file

FEWEST_STEPS_FILE = "fewest_steps.json"


class FewestSteps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured minimum number of steps of each sampler on one model.

    Attributes:
        digest: Digest of the model.
        most: Highest number of steps that was measured.
        steps: Minimum number of steps for correct images, by sampler and optional sigma schedule ("dpmpp_2m karras");
            ``None`` if no measured number is sufficient.
    """

    digest: str
    most: int
    steps: dict[str, int | None]

    def warning(self, sampler: str, sigma_schedule: str | None, num_steps: int) -> str | None:
        """Return a warning if ``num_steps`` are too few; ``None`` if they are sufficient or not measured."""
        name = f"{sampler} {sigma_schedule}" if sigma_schedule else sampler
        if name not in self.steps or num_steps > self.most:
            return None
        fewest = self.steps[name]
        if fewest is None:
            return f"{name} gives no correct images with this model at up to {self.most} steps; use another sampler."
        if num_steps < fewest:
            count = f"1 step of {name} is" if num_steps == 1 else f"{num_steps} steps of {name} are"
            return f"{count} too few for this model; use at least {fewest}."
        return None


def read_fewest_steps(directory: Path) -> FewestSteps | None:
    """Read ``fewest_steps.json`` in ``directory``; ``None`` if there is no such file.

    Raises:
        ModelLoadError: The file cannot be read.
    """
    return read_model_file(directory / FEWEST_STEPS_FILE, FewestSteps)
