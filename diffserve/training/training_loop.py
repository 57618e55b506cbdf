"""Shared code of the training stages: settings, schedule, averaging of weights, checkpoints, progress, the bill."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from diffserve.api.errors import ConfigError
from diffserve.runtime.precision import cpu_bf16_unit

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return the nearest matrix (rows, columns) with singular values around one, by Newton-Schulz products.

    Products are in bf16 where the device is fast at it.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix if matrix.device.type == "cpu" and cpu_bf16_unit() is None else matrix.bfloat16()
    wide: Tensor = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return (wide if x.shape[0] <= x.shape[1] else wide.T).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with orthogonal updates for every parameter of two or more dimensions.

    Jordan et al., 2024 ("Muon: an optimizer for hidden layers"), with the update scaled to AdamW's size as in Liu et
    al., 2025 (arXiv 2502.16982, eq. 4). ``torch.optim.Muon`` takes matrices only; here a convolution's kernel
    (out, in, kh, kw) is the matrix (out, in * kh * kw).
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply one update from the current gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                trace = state.setdefault("trace", torch.zeros_like(parameter))
                trace.lerp_(parameter.grad, 1 - group["momentum"])
                looking_ahead = parameter.grad.lerp(trace, group["momentum"])
                update = orthogonalise(looking_ahead.flatten(1))
                scale = 0.2 * max(update.shape) ** 0.5
                parameter.add_(update.view_as(parameter), alpha=-group["lr"] * scale)


def hidden_matrices(net: nn.Module) -> list[nn.Parameter]:
    """Return the parameters for Muon: every matrix or kernel except embeddings and the first and last layer."""
    outer = ("embedding", "conv_in", "conv_out", "layout_head")
    return [
        parameter
        for name, parameter in net.named_parameters()
        if parameter.requires_grad and parameter.ndim >= 2 and not any(word in name for word in outer)
    ]


Net = TypeVar("Net", bound=nn.Module)
Look = Callable[[Net, int], None]
"""Callback that receives the averaged weights and the number of completed iterations."""


@dataclass(frozen=True)
class TrainSettings:
    """Settings of one training stage.

    The learning rate warms up linearly and falls along a cosine over the last ``decay_share``. With ``max_seconds`` the
    stage ends after that time or after its iterations, whichever comes first, and the rate follows the earlier end.
    """

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
    max_seconds: float | None = None


def share_done(iteration: int, seconds: float, settings: TrainSettings) -> float:
    """Return the progress of a stage, 0 to 1, by iterations or by time, whichever is further."""
    by_time = 0.0 if settings.max_seconds is None else seconds / settings.max_seconds
    return min(1.0, max(iteration / max(1, settings.iterations), by_time))


def rate_factor(iteration: int, settings: TrainSettings, seconds: float = 0.0) -> float:
    """Return the learning-rate factor of one iteration: warm-up, plateau, cosine to a hundredth."""
    warm = min(1.0, (iteration + 1) / settings.warmup)
    plateau = 1 - settings.decay_share
    share = max(0.0, (share_done(iteration, seconds, settings) - plateau) / max(settings.decay_share, 1e-6))
    return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


def adamw(params: Iterable[nn.Parameter], settings: TrainSettings) -> torch.optim.Optimizer:
    """Build AdamW at the stage's learning rate, with a second moment that adapts within a hundred iterations."""
    return torch.optim.AdamW(
        params, lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=settings.weight_decay, fused=True
    )


def muon_and_adamw(
    net: nn.Module, hidden: Sequence[nn.Parameter], settings: TrainSettings
) -> list[torch.optim.Optimizer]:
    """Build Muon for the ``hidden`` matrices and kernels of ``net``, AdamW for all others, at one learning rate."""
    taken = {id(parameter) for parameter in hidden}
    other_parameters = [
        parameter for parameter in net.parameters() if parameter.requires_grad and id(parameter) not in taken
    ]
    return [Muon(hidden, lr=settings.learning_rate), adamw(other_parameters, settings)]


def fingerprint(net: nn.Module) -> str:
    """Return twelve hex digits of a hash of the weights of ``net``, to identify what derived data belongs to."""
    digest = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def keep(what: object, path: Path) -> None:
    """Save an object atomically: write a temporary file and rename it, so that a kill never leaves a partial file."""
    part = path.with_suffix(".part")
    torch.save(what, part)
    part.replace(path)


class Run(Generic[Net]):
    """One resumable stage: the averaged weights, the checkpoint ``work/<name>.pt`` and the optimizers.

    ``average`` holds the exponential moving average of the weights, ready for inference. ``work/<name>.json`` is the
    bill: settings, iterations, seconds, and floating-point operations, counted on the first iteration of a process and
    multiplied.

    ``optimizers`` default to Muon and AdamW; each optimizer's initial learning rate is its peak. ``made_from`` is the
    fingerprint of the weights that the stage depends on.

    Raises:
        ConfigError: the checkpoint was made from other weights.
    """

    def __init__(
        self,
        name: str,
        net: Net,
        settings: TrainSettings,
        work: Path,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
        *,
        made_from: str = "",
    ) -> None:
        self.made_from = made_from
        self.name, self.net, self.settings = name, net, settings
        self.path = work / f"{name}.pt"
        self.average = copy.deepcopy(net).eval().requires_grad_(False)
        self.optimizers = optimizers or muon_and_adamw(net, hidden_matrices(net), settings)
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.iteration = 0
        self.begun = datetime.now(UTC).isoformat(timespec="minutes")
        self.seconds = 0.0
        self.flops = 0
        self.smooth_loss = math.nan
        if self.path.is_file():
            self._load()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the bf16 autocast context of the device; the loss itself stays in fp32."""
        return torch.autocast(torch.device(self.settings.device).type, dtype=torch.bfloat16)

    def iterations(self) -> Iterator[int]:
        """Yield the remaining iterations, saving and reporting on the way and at the end."""
        counter = FlopCounterMode(display=False)
        flops_each = 0
        with self._progress() as progress:
            task = progress.add_task(self.name, total=self.settings.iterations, completed=self.iteration, loss="")
            while not self.is_over:
                started = time.perf_counter()
                with contextlib.nullcontext() if flops_each else counter:
                    yield self.iteration
                flops_each = flops_each or counter.get_total_flops() or 1
                self.flops += flops_each
                self.seconds += time.perf_counter() - started
                self.iteration += 1
                progress.update(task, completed=self.iteration, loss=f"loss {self.smooth_loss:.4f}")
                if progress.disable and self.iteration % 50 == 0:
                    self._report()
                if self.iteration % self.settings.checkpoint_every == 0 or self.is_over:
                    self.save()

    @property
    def is_over(self) -> bool:
        """Whether the iterations or the seconds are used up."""
        return share_done(self.iteration, self.seconds, self.settings) >= 1

    def train(
        self, losses_of: Callable[[], Sequence[Tensor]], look: Look[Net] | None = None, look_every: int = 500
    ) -> Net:
        """Run the remaining iterations, each a :meth:`step` on new losses.

        Args:
            losses_of: computes the main loss and optionally an auxiliary one.
            look: called with the averaged weights every ``look_every`` iterations.
            look_every: iterations between calls of ``look``.

        Returns:
            The averaged weights.
        """
        for iteration in self.iterations():
            self.step(*losses_of())
            if look is not None and (iteration + 1) % look_every == 0:
                look(self.average, iteration + 1)
        return self.average

    def step(self, loss: Tensor, aside: Tensor | None = None) -> None:
        """Take one optimizer step on ``loss``, which is reported, plus the auxiliary loss ``aside``.

        A step whose loss is not finite is skipped.
        """
        value = float(loss.detach())
        total = loss if aside is None else loss + aside
        self.net.zero_grad(set_to_none=True)
        if not torch.isfinite(total):
            return
        total.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), self.settings.max_grad_norm)
        factor = rate_factor(self.iteration, self.settings, self.seconds)
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            optimizer.step()
        decay = min(self.settings.ema, (1 + self.iteration) / (10 + self.iteration))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.net.parameters()), 1 - decay)
        self.smooth_loss = value if math.isnan(self.smooth_loss) else 0.98 * self.smooth_loss + 0.02 * value

    def save(self) -> None:
        """Write the checkpoint and the bill."""
        keep(
            {
                "net": self.net.state_dict(),
                "average": self.average.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "iteration": self.iteration,
                "seconds": self.seconds,
                "flops": self.flops,
                "begun": self.begun,
                "loss": self.smooth_loss,
                "made_from": self.made_from,
            },
            self.path,
        )
        bill = {
            "stage": self.name,
            "begun": self.begun,
            "iterations_done": self.iteration,
            "seconds": round(self.seconds),
            "flops": self.flops,
            "loss": round(self.smooth_loss, 5),
        }
        text = json.dumps(bill | asdict(self.settings), indent=2)
        self.path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")

    def _load(self) -> None:
        saved = torch.load(self.path, map_location=self.settings.device, weights_only=True)
        if saved.get("made_from", "") != self.made_from:
            raise ConfigError(
                f"{self.path} was made from other weights than {self.made_from}: remove it to begin this stage anew, "
                "or give another --work."
            )
        self.net.load_state_dict(saved["net"])
        self.average.load_state_dict(saved["average"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.iteration, self.seconds, self.smooth_loss = saved["iteration"], saved["seconds"], saved["loss"]
        self.flops, self.begun = saved["flops"], saved["begun"]

    @staticmethod
    def _progress() -> Progress:
        """Create a progress bar on a terminal; elsewhere it is disabled and lines are printed instead."""
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        return Progress(*columns, TextColumn("{task.fields[loss]}"), console=console, disable=not console.is_terminal)

    def _report(self) -> None:
        each = self.seconds / max(1, self.iteration)
        left = each * (self.settings.iterations - self.iteration) / 60
        print(
            f"{self.name} {self.iteration}/{self.settings.iterations} loss {self.smooth_loss:.4f} "
            f"{each:.2f} s/iteration, {left:.0f} min left",
            flush=True,
        )
