"""Simulation of the scheduler: real requests and step tables, ticks with given outcomes. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from diffserve.api.types import DiffusionParams, Event, GenerationRequest, ModelInfo
from diffserve.engine.image.admission import ImageAdmission
from diffserve.engine.image.policy import TickCosts
from diffserve.engine.image.scheduler import RequestScheduler
from diffserve.engine.image.task import GroupKey, ImageTask, LiveRequest, StepPreview, TickOutcome, TickPlan
from diffserve.engine.records import FailureReason
from diffserve.settings.config import EngineConfig
from schedulers import NoiseSchedule

INFO = ModelInfo(
    model_id="sim",
    family="sd1",
    digest="0" * 12,
    prediction_type="epsilon",
    vae_factor=8,
    latent_channels=4,
    size_multiple_px=8,
    good_sizes=((64, 64), (64, 96)),
    max_side_px=128,
    train_timesteps=1000,
    is_inpainting=False,
    default_sampler="ddim",
    default_num_steps=10,
    default_guidance_scale=5.0,
    default_spacing="leading",
    device="cpu",
    dtype="float32",
    choice_reason="a test",
    num_parameters=1,
    weights_bytes=4,
)
SCHEDULE = NoiseSchedule(np.linspace(0.999, 0.005, 1000))
PIXELS = np.zeros((8, 8, 3), dtype=np.uint8)


def admission(info: ModelInfo = INFO, **config: Any) -> ImageAdmission:
    """Return the admission of a model that is only described."""
    return ImageAdmission(info, SCHEDULE, config)


def request(*, num_steps: int = 10, guidance_scale: float = 5.0, **fields: Any) -> GenerationRequest:
    """Return a request; ``fields`` may also be fields of DiffusionParams."""
    names = [name for name in fields if name in DiffusionParams.__struct_fields__]
    diffusion = {name: fields.pop(name) for name in names}
    params = DiffusionParams(num_steps=num_steps, guidance_scale=guidance_scale, **diffusion)
    return GenerationRequest(prompt="a fox", diffusion=params, **fields)


class ConstantCosts:
    """Every call takes a second."""

    def __init__(self, row_cap: int) -> None:
        self._row_cap = row_cap

    def row_cap(self, group: GroupKey, *, may_probe: bool = True) -> int:
        return self._row_cap

    def call_s(self, group: GroupKey, num_rows: int) -> float:
        return 1.0


class Simulation:
    """A scheduler and a clock that moves one second a tick."""

    def __init__(self, row_cap: int = 8, costs: TickCosts | None = None, **config: Any) -> None:
        self.scheduler = RequestScheduler(EngineConfig(**config), INFO, costs or ConstantCosts(row_cap))
        self.now_s = 0.0
        self.admission = admission()

    def submit(self, **fields: Any) -> LiveRequest:
        """Submit a request."""
        live = self.admission.admit(request(**fields), self.now_s)
        self.scheduler.add(live)
        return live

    def plan(self) -> TickPlan:
        """Plan the next tick."""
        return self.scheduler.plan(self.now_s)

    def apply(self, plan: TickPlan, failures: dict[ImageTask, FailureReason] | None = None) -> list[Event]:
        """Apply the planned tick as successful, except for ``failures``."""
        outcome = TickOutcome(failures=failures or {}, rows_started_s=self.now_s, rows_ended_s=self.now_s + 1.0)
        self.now_s += 1.0
        for task in plan.prepare:
            if task not in outcome.failures:
                outcome.groups[task] = GroupKey(task.settings.height_px, task.settings.width_px, 77)
            outcome.prepare_s[task] = 0.25
        for task in plan.decode:
            if task not in outcome.failures:
                outcome.pictures[task] = PIXELS
            outcome.decode_s[task] = 0.5
        for task in plan.previews:
            outcome.previews[task] = StepPreview(task.step_index + 1, PIXELS)
        return self.scheduler.apply(plan, outcome, self.now_s)

    def tick(self) -> tuple[TickPlan, list[Event]]:
        """One good tick."""
        plan = self.plan()
        return plan, self.apply(plan)

    def step(self) -> list[Event]:
        """Good ticks up to one that does not only prepare."""
        while True:
            plan, events = self.tick()
            if not plan.prepare:
                return events

    def run(self) -> list[Event]:
        """Good ticks until nothing is left."""
        events: list[Event] = []
        while self.scheduler.has_work:
            events += self.tick()[1]
        return events
