"""What every training stage shares: settings, schedule, averaging of weights, checkpoints, a line of progress."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

Net = TypeVar("Net", bound=nn.Module)


@dataclass(frozen=True)
class TrainSettings:
    """How one stage is trained. The rate warms up linearly and falls along a cosine over the last ``decay_share``."""

    iterations: int
    batch_size: int
    learning_rate: float
    device: str = "cpu"
    seed: int = 0
    warmup: int = 200
    decay_share: float = 0.4
    ema: float = 0.999
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    checkpoint_every: int = 250


def rate_factor(iteration: int, settings: TrainSettings) -> float:
    """What the learning rate is multiplied with at one iteration: warm-up, plateau, cosine to a hundredth."""
    warm = min(1.0, (iteration + 1) / settings.warmup)
    decay_from = settings.iterations * (1 - settings.decay_share)
    share = max(0.0, (iteration - decay_from) / max(1.0, settings.iterations - decay_from))
    return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


def adamw(params: Iterable[nn.Parameter], settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW at the stage's learning rate, with a second moment that adapts within a hundred iterations."""
    return torch.optim.AdamW(
        params, lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=settings.weight_decay, fused=True
    )


class Run(Generic[Net]):
    """One resumable stage: owns the averaged weights and the checkpoint ``work/<name>.pt``, and paces the optimisers.

    ``optimizers`` default to one AdamW over everything; each keeps the learning rate it was made with as its peak.
    """

    def __init__(
        self,
        name: str,
        net: Net,
        settings: TrainSettings,
        work: Path,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        self.name, self.net, self.settings = name, net, settings
        self.path = work / f"{name}.pt"
        self.average = copy.deepcopy(net).eval().requires_grad_(False)
        self.optimizers = optimizers or [adamw(net.parameters(), settings)]
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.iteration = 0
        self.seconds = 0.0
        self.smooth_loss = math.nan
        if self.path.is_file():
            self._load()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bf16 on every device; the loss itself stays in fp32."""
        return torch.autocast(torch.device(self.settings.device).type, dtype=torch.bfloat16)

    def iterations(self) -> Iterator[int]:
        """Count through what is left, saving and reporting on the way and at the end."""
        while self.iteration < self.settings.iterations:
            started = time.perf_counter()
            yield self.iteration
            self.seconds += time.perf_counter() - started
            self.iteration += 1
            if self.iteration % 50 == 0:
                self._report()
            if self.iteration % self.settings.checkpoint_every == 0 or self.iteration == self.settings.iterations:
                self.save()

    def step(self, loss: Tensor) -> None:
        """One optimiser step on ``loss``; a non-finite loss is skipped rather than learnt."""
        value = float(loss.detach())
        self.net.zero_grad(set_to_none=True)
        if not math.isfinite(value):
            return
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), self.settings.max_grad_norm)
        factor = rate_factor(self.iteration, self.settings)
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            optimizer.step()
        keep = min(self.settings.ema, (1 + self.iteration) / (10 + self.iteration))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.net.parameters()), 1 - keep)
        self.smooth_loss = value if math.isnan(self.smooth_loss) else 0.98 * self.smooth_loss + 0.02 * value

    def averaged(self) -> Net:
        """The exponential moving average of the weights, ready for inference."""
        return self.average

    def save(self) -> None:
        """Write the checkpoint beside its final name and move it there, so a kill never leaves half a file."""
        part = self.path.with_suffix(".part")
        torch.save(
            {
                "net": self.net.state_dict(),
                "average": self.average.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "iteration": self.iteration,
                "seconds": self.seconds,
                "loss": self.smooth_loss,
            },
            part,
        )
        part.replace(self.path)

    def _load(self) -> None:
        saved = torch.load(self.path, map_location=self.settings.device, weights_only=True)
        self.net.load_state_dict(saved["net"])
        self.average.load_state_dict(saved["average"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.iteration, self.seconds, self.smooth_loss = saved["iteration"], saved["seconds"], saved["loss"]

    def _report(self) -> None:
        each = self.seconds / max(1, self.iteration)
        left = each * (self.settings.iterations - self.iteration) / 60
        print(
            f"{self.name} {self.iteration}/{self.settings.iterations} loss {self.smooth_loss:.4f} "
            f"{each:.2f} s/iteration, {left:.0f} min left",
            flush=True,
        )
