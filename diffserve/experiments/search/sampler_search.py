"""Search for the step table of a frozen model: timesteps and coefficients are optimized by gradients.

A least-squares fit of each row to converged trajectories is the start (see :mod:`.trajectory_fit`).
The loss compares the final latents of N evaluations with converged latents from the same noise, on training prompts
and seeds. The gradient passes through all rows of the sampler, as in LD3 (Tong et al. 2024) and S4S (arXiv 2502.17423).
Validation pairs select the table that is kept; test pairs measure it once at the end. The three sets share no prompts
and no seeds.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from diffserve.experiments.search.learnable_table import LearnableTable
from diffserve.experiments.search.pairs import Pairs, run_rows, sample, squared_errors
from diffserve.experiments.search.trajectory_fit import fit_rows
from diffserve.runtime.footprint import meta_copy
from diffserve.runtime.memory import free_bytes
from diffserve.runtime.model import DiffusionModel
from diffserve.runtime.unet.random_rows import random_call
from schedulers.errors import InvalidTable
from schedulers.learned import LearnedSampler

ERROR_FLOOR: Final = 3e-4
"""Added to the mean squared error in the loss, so that images that are already close do not dominate it."""

GAP_RATE: Final = 6e-3
WEIGHT_RATE: Final = 1.5e-3
"""Largest learning rates of the timesteps and of the coefficients; cosine decay after a linear rise."""

EXPONENTS: Final = (0.9, 1.0, 1.1)
"""Spacings that the least-squares fit tries, see ``LearnableTable.space``."""

DB_PER_NAT: Final = 10.0 / math.log(10.0)
SETS: Final = ("training", "validation", "test")
MAX_HELD_BACK: Final = 28
"""Largest number of prompts for validation, and for the test."""

WARMUP: Final = 5
SMALLEST_DECAY: Final = 0.02
MAX_GRADIENT: Final = 1.0
VALIDATE_EVERY: Final = 10
MEMORY_SHARE: Final = 0.5
"""Share of the free memory that activations may take; above it UNet calls are computed again for their gradients."""


@dataclass(frozen=True)
class SearchPlan:
    """Settings of a search.

    Attributes:
        guidance_scale: Scale at which the table is learned.
        training, validation, test: Disjoint prompts; each has its own seed.
        first_seed: Seed of the first training prompt; validation and test prompts have the seeds after them.
        iterations: Number of gradient steps.
        batch: Images per gradient step.
        target_steps: Steps of DPM-Solver++(2M) of the converged latents.
    """

    guidance_scale: float
    training: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...]
    first_seed: int = 10_000
    iterations: int = 120
    batch: int = 4
    target_steps: int = 40

    @classmethod
    def split(cls, prompts: Sequence[str], guidance_scale: float, **settings: Any) -> SearchPlan:
        """Split five or more different prompts: a fifth, at most ``MAX_HELD_BACK``, to validate and to test each."""
        part = min(len(prompts) // 5, MAX_HELD_BACK)
        training, validation, test = prompts[: -2 * part], prompts[-2 * part : -part], prompts[-part:]
        return cls(guidance_scale, tuple(training), tuple(validation), tuple(test), **settings)

    @property
    def prompts(self) -> tuple[tuple[str, ...], ...]:
        """The three sets."""
        return self.training, self.validation, self.test


class Memory(NamedTuple):
    """Memory of a search in bytes, computed without running it.

    Attributes:
        weights: The UNet.
        activations: Activations of one evaluation that the gradient needs, for a whole batch.
        free: Memory of the device that is free in addition to the weights; ``None`` if unknown.
    """

    weights: int
    activations: int
    free: int | None

    @classmethod
    def of(cls, model: DiffusionModel, batch: int, device: torch.device | None = None) -> Memory:
        """Compute the memory of a search by a dry run on empty tensors.

        Args:
            model: The model; on the meta device it has no weights yet.
            batch: Images per gradient step.
            device: Device that a model on the meta device will be loaded on.
        """
        twin = meta_copy(model)
        width_px, height_px = model.native_size
        bytes_by_storage: dict[int, int] = {}
        weights = {parameter.untyped_storage()._cdata for parameter in twin.unet.network.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                bytes_by_storage[storage._cdata] = storage.nbytes()
            return tensor

        call = random_call(twin, (height_px, width_px, model.text.window_tokens), 2 * batch)
        call = call._replace(sample=call.sample.requires_grad_())
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = twin.unet.plain(call)
        assert output.requires_grad
        num_bytes = sum(parameter.nbytes for parameter in model.unet.network.parameters())
        free = free_bytes(model.device if device is None else device)
        if free is not None and device is not None:
            free = max(0, free - model.info.weights_bytes)
        return cls(num_bytes, sum(bytes_by_storage.values()), free)

    def recomputes(self, num_rows: int) -> bool:
        """Return whether each UNet call is computed again for its gradient."""
        return self.free is not None and num_rows * self.activations > MEMORY_SHARE * self.free

    def describe(self, num_rows: int) -> str:
        """Describe the memory of a search for ``num_rows`` evaluations in one sentence."""
        recomputes = self.recomputes(num_rows)
        activations = self.activations * (1 if recomputes else num_rows)
        way = "each UNet call is computed again for its gradient" if recomputes else "no call is computed again"
        free = "" if self.free is None else f"; {self.free / 1e9:.2f} GB are free for them"
        return (
            f"memory for {num_rows} evaluations: {self.weights / 1e9:.2f} GB of UNet weights and "
            f"{activations / 1e9:.2f} GB of activations ({way}){free}"
        )


class SearchProgress(NamedTuple):
    """State of a search.

    Attributes:
        num_rows: Evaluations of the table.
        iteration: Gradient steps done.
        iterations: Gradient steps in total.
        gain_db: Improvement on the validation pairs over DPM-Solver++(2M), in dB.
        seconds: Time since the start of the search for this table.
    """

    num_rows: int
    iteration: int
    iterations: int
    gain_db: float
    seconds: float

    def describe(self) -> str:
        """Describe the state in one line."""
        done = f"{self.num_rows} evaluations, iteration {self.iteration} of {self.iterations}"
        return f"{done}: {self.gain_db:+.2f} dB on validation prompts, {self.seconds:.0f} s"


class SamplerSearch:
    """Searches for tables with several numbers of evaluations; all use the same pairs.

    Args:
        model: The model, in float32, bfloat16 or float16; its UNet is frozen.
        plan: Settings.
    """

    def __init__(self, model: DiffusionModel, plan: SearchPlan) -> None:
        model.unet.network.requires_grad_(False)
        self._model = model
        self._plan = plan
        self.memory = Memory.of(model, plan.batch)
        self._pairs: list[Pairs] = []
        self._seconds_of_pairs = 0.0

    def prepare(self, check: Callable[[], None] = lambda: None) -> None:
        """Compute the converged latents; ``check`` is called between batches and may raise to stop."""
        plan, seed, started_s = self._plan, self._plan.first_seed, time.monotonic()
        for prompts in plan.prompts:
            pairs = Pairs.make(
                self._model,
                prompts,
                seed,
                plan.guidance_scale,
                num_steps=plan.target_steps,
                batch=2 * plan.batch,
                keeps_path=prompts is plan.training,
                check=check,
            )
            self._pairs.append(pairs)
            seed += len(prompts)
        self._seconds_of_pairs = time.monotonic() - started_s

    def run(self, num_rows: int, name: str, on_progress: Callable[[SearchProgress], None]) -> LearnedSampler:
        """Search for a table with ``num_rows`` evaluations.

        Args:
            num_rows: Number of evaluations.
            name: Name of the sampler.
            on_progress: Called after each validation; may raise to stop.

        Returns:
            The table that was best on the validation pairs; DPM-Solver++(2M) if none was better. Tables that deviate
            from the invariants of step tables by more than ``MAX_RESIDUAL`` are skipped.
        """
        model, plan, (training, validation, test) = self._model, self._plan, self._pairs
        started_s = time.monotonic()
        start = LearnableTable(model.schedule, num_rows)
        start_error = self._errors(start, validation).mean().item()

        def report(iteration: int, error: float) -> None:
            gain_db = (start_error - error) * DB_PER_NAT
            seconds = time.monotonic() - started_s
            on_progress(SearchProgress(num_rows, iteration, plan.iterations, gain_db, seconds))

        best_error, best = start_error, start
        for exponent in EXPONENTS:
            candidate = LearnableTable(model.schedule, num_rows)
            candidate.space(exponent)
            fit_rows(model, candidate, training, plan.guidance_scale, batch=2 * plan.batch, error_floor=ERROR_FLOOR)
            error = self._errors(candidate, validation).mean().item()
            if error < best_error and self._is_valid(candidate):
                best_error, best = error, candidate
            report(0, best_error)
        table = copy.deepcopy(best)
        optimizer = torch.optim.Adam(
            [{"params": [table.gaps]}, {"params": [*table.parameters()][1:]}], betas=(0.9, 0.97)
        )
        for iteration, places in enumerate(self._batches(len(training.noise)), start=1):
            decay = max(0.5 * (1.0 + math.cos(math.pi * (iteration - 1) / plan.iterations)), SMALLEST_DECAY)
            for group, rate in zip(optimizer.param_groups, (GAP_RATE, WEIGHT_RATE), strict=True):
                group["lr"] = rate * decay * min(1.0, iteration / WARMUP)
            self._step(table, optimizer, training.take(places))
            if iteration % VALIDATE_EVERY == 0 or iteration == plan.iterations:
                error = self._errors(table, validation).mean().item()
                if error < best_error and self._is_valid(table):
                    best_error, best = error, copy.deepcopy(table)
                report(iteration, error)
        seconds = time.monotonic() - started_s
        return self._describe(best, name, test, self._errors(start, test), seconds)

    def _batches(self, count: int) -> Iterator[list[int]]:
        """Yield the places of a batch for each iteration, in a random order that repeats every time."""
        rng = torch.Generator().manual_seed(0)
        order: list[int] = []
        for _ in range(self._plan.iterations):
            if len(order) < self._plan.batch:
                order = torch.randperm(count, generator=rng).tolist()
            yield order[: self._plan.batch]
            order = order[self._plan.batch :]

    def _step(self, table: LearnableTable, optimizer: torch.optim.Optimizer, pairs: Pairs) -> None:
        model = self._model
        latents = run_rows(
            model,
            table().float().to(model.device),
            pairs.noise,
            pairs.texts,
            self._plan.guidance_scale,
            recompute=self.memory.recomputes(table.num_rows),
        )
        loss = torch.log(squared_errors(latents, pairs.target) + ERROR_FLOOR).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(table.parameters(), MAX_GRADIENT)
        optimizer.step()

    def _errors(self, table: LearnableTable, pairs: Pairs) -> Tensor:
        """Return the logarithm (B,) of the mean squared error of each image's latents."""
        with torch.no_grad():
            rows = table().float().to(self._model.device)
        latents = sample(
            self._model, rows, pairs.noise, pairs.texts, self._plan.guidance_scale, batch=2 * self._plan.batch
        )
        return torch.log(squared_errors(latents, pairs.target))

    def _describe(
        self, table: LearnableTable, name: str, test: Pairs, start_errors: Tensor, seconds: float
    ) -> LearnedSampler:
        model, plan = self._model, self._plan
        errors = self._errors(table, test)
        peak = (test.target.max() - test.target.min()).item()
        gains = (start_errors - errors) * DB_PER_NAT
        counts = {kind: len(pairs.noise) for kind, pairs in zip(SETS, self._pairs, strict=True)}
        return self._sampler(
            table,
            name=name,
            search={
                **{"pairs": counts, "first_seed": plan.first_seed, "iterations": plan.iterations, "batch": plan.batch},
                **{"target_steps": plan.target_steps, "dtype": str(model.dtype).removeprefix("torch.")},
                "seconds": round(seconds),
                "seconds_of_targets": round(self._seconds_of_pairs),
            },
            measured={
                "psnr_db": round((2.0 * math.log(peak) - errors).mean().item() * DB_PER_NAT, 2),
                "start_psnr_db": round((2.0 * math.log(peak) - start_errors).mean().item() * DB_PER_NAT, 2),
                "gain_db": round(gains.mean().item(), 2),
                "gain_db_deviation": round(gains.std(correction=0).item(), 2),
                "images": len(gains),
                "peak": round(peak, 4),
            },
        )

    def _sampler(self, table: LearnableTable, **record: Any) -> LearnedSampler:
        model = self._model
        return LearnedSampler.from_columns(
            table.columns(),
            model=model.model_id,
            model_digest=model.digest,
            prediction_type=model.schedule.prediction_type,
            guidance_scale=self._plan.guidance_scale,
            **record,
        )

    def _is_valid(self, table: LearnableTable) -> bool:
        """Return whether the table approximately satisfies the invariants of step tables."""
        try:
            self._sampler(table, name="candidate")
        except InvalidTable:
            return False
        return True
