"""Engines of a sweep: one for each model and precision of its plan, of which one is open at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from diffserve.experiments import provenance
from diffserve.experiments.axes import write_settings
from diffserve.experiments.engine_generator import SweepEngine, request_for
from diffserve.experiments.measure import PromptCheck
from diffserve.experiments.plan import EngineKey, SweepPlan
from diffserve.models.learned_samplers import LearnedSamplers

if TYPE_CHECKING:
    from diffserve.engine import Engine

EngineT = TypeVar("EngineT", bound=SweepEngine)
OpenEngine = Callable[[EngineKey], "Engine"]
"""Opens the engine of a model and precision."""


@dataclass(frozen=True)
class EngineFacts:
    """Properties of an engine of a sweep that are needed after it is closed.

    Attributes:
        setup: Everything of the engine that the results of an image depend on.
        check: The checker of the prompts.
        model: Description for reports, see :func:`provenance.model`.
        unet_bytes: Size of the UNet's weights, 0 if it is not known.
    """

    setup: Mapping[str, Any]
    check: PromptCheck
    model: Mapping[str, Any]
    unet_bytes: int

    @classmethod
    def of(cls, engine: SweepEngine, plan: SweepPlan, unet_bytes: int = 0) -> EngineFacts:
        """Collect the facts of an open engine."""
        info = engine.info
        check = PromptCheck(info.family, plan.all_prompts)
        setup = {
            "weights": engine.model.digest,
            "dtype": info.dtype,
            "device": info.device,
            "spacing": info.default_spacing,
            "size": info.good_sizes[0],
            "is_deterministic": engine.is_deterministic,
            "is_checked": check.wishes is not None,
        }
        samplers = LearnedSamplers.of(info)
        if plan.learned:
            setup["learned"] = {sampler: samplers.find(sampler).digest for sampler in sorted(plan.learned)}
        return cls(
            setup=setup,
            check=check,
            model=provenance.model(info, is_deterministic=engine.is_deterministic),
            unet_bytes=unet_bytes,
        )


class Engines(Generic[EngineT]):
    """The engines of a plan; opening one closes the one before, so that only one model is in memory.

    Args:
        open_engine: Opens an engine, or an engine that is always open.
    """

    def __init__(self, open_engine: Callable[[EngineKey], EngineT] | EngineT) -> None:
        self._open = open_engine if callable(open_engine) else lambda _: open_engine
        self._current: tuple[EngineKey, EngineT] | None = None

    def get(self, key: EngineKey) -> EngineT:
        """Return the engine of a model and precision, and open it if another one is open."""
        if self._current is None or self._current[0] != key:
            self._current = None
            gc.collect()  # engine and model form reference cycles
            self._current = key, self._open(key)
        return self._current[1]


def check_plan(engines: Engines[Engine], plan: SweepPlan) -> dict[EngineKey, EngineFacts]:
    """Check that every engine accepts the requests of its cells, before any of them generates images.

    The first engine is left open.

    Returns:
        The facts of each engine.

    Raises:
        DiffserveError: An engine cannot be opened or rejects a request.
    """
    facts = {key: _check_engine(engines.get(key), plan, key) for key in reversed(plan.engines)}
    return {key: facts[key] for key in plan.engines}


def _check_engine(engine: Engine, plan: SweepPlan, key: EngineKey) -> EngineFacts:
    plan.check(engine.info)
    for cell in plan.cells_of(key):
        engine.check(request_for(plan, cell, plan.places[0]))
    unet_bytes = next(part.weights_bytes for part in engine.model.memory_report() if part.component == "unet")
    return EngineFacts.of(engine, plan, unet_bytes)


def shared_setup(facts: Mapping[EngineKey, EngineFacts]) -> dict[str, Any]:
    """Return the setups of all engines in one, each field with the model and precision that are axes in its name."""
    return {f"{name}{write_settings(key)}": value for key, fact in facts.items() for name, value in fact.setup.items()}
