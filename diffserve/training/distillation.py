"""The distillation stage: a LoRA of the UNet that generates images in four steps without guidance.

Progressive distillation (Salimans & Ho, 2022, arXiv 2202.00512, section 3) directly to the trailing timesteps 999, 749,
499 and 249, with distilled guidance (Meng et al., 2023, arXiv 2210.03142) in low-rank changes as in LCM-LoRA (Luo et
al., 2023, arXiv 2311.05556). From a point x the teacher takes several guided DDIM steps to the next timestep, x'; the
target is the velocity that reaches x' in one step. An error of it moves the next point by sin(d) times as much, d being
the angle of the step (see :class:`Ladder`), so the loss is weighted with sin(d) squared.

Points come from whole trajectories that begin in pure noise: first the teacher's, later the distilled model's, so that
the teacher also corrects the mistakes of the distilled model (Ross et al., 2011, "DAgger").
"""

from __future__ import annotations

import copy
import json
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTokenizer

from diffserve.api.errors import ConfigError
from diffserve.models.lora_layers import WORDS_KEY
from diffserve.runtime.low_rank import adaptable, shape_of
from diffserve.training.denoiser_training import Denoiser, build_scheduler
from diffserve.training.latents import LatentScenes, draw_rows
from diffserve.training.training_loop import Look, Run, TrainSettings, adamw, fingerprint, keep
from diffserve.world.captions import loose_caption

NUM_STEPS = 4


@dataclass(frozen=True)
class Trajectories:
    """N trajectories of one canvas.

    Points and target velocities are (N, NUM_STEPS, 8, h, w) in 16 bits, the captions' token ids (N, MAX_TOKENS).
    """

    points: Tensor
    velocities: Tensor
    token_ids: Tensor


class Ladder:
    """Timesteps of the distilled model and the teacher's steps between them, as angles of the noise schedule.

    With signal and noise as cosine and sine of an angle, DDIM turns a point x by d = angle - angle' towards the image:

        x' = cos(d) x - sin(d) v                            (Salimans & Ho, 2022, arXiv 2202.00512, appendix D)
    """

    def __init__(self, substeps: int, num_steps: int = NUM_STEPS) -> None:
        scheduler = build_scheduler()
        scheduler.set_timesteps(num_steps * substeps)
        self.fine: list[list[int]] = torch.tensor(scheduler.timesteps.tolist()).view(num_steps, substeps).tolist()
        self.timesteps = [steps[0] for steps in self.fine]
        self._angles = scheduler.alphas_cumprod.double().sqrt().acos().tolist()

    def turn(self, timestep: int, after: int | None) -> float:
        """Return the DDIM angle d from ``timestep`` to the timestep ``after``; None is the clean end."""
        return float(self._angles[timestep] - (0.0 if after is None else self._angles[after]))

    def turns(self) -> list[float]:
        """Return the angles of the distilled model's own steps."""
        return [self.turn(now, after) for now, after in zip(self.timesteps, [*self.timesteps[1:], None], strict=True)]

    def steps(self, index: int) -> Iterator[tuple[int, float]]:
        """Yield (timestep, angle) of each of the teacher's steps for the distilled model's step ``index``."""
        end = self.timesteps[index + 1] if index + 1 < len(self.timesteps) else None
        fine = self.fine[index]
        for now, after in zip(fine, [*fine[1:], end], strict=True):
            yield now, self.turn(now, after)


def ddim_step(points: Tensor, velocities: Tensor, angle: float) -> Tensor:
    """Take one DDIM step: turn ``points`` by ``angle`` towards the image."""
    return math.cos(angle) * points - math.sin(angle) * velocities


def velocity_to(points: Tensor, goal: Tensor, angle: float) -> Tensor:
    """Return the velocity with which :func:`ddim_step` takes ``points`` to ``goal``."""
    return (math.cos(angle) * points - goal) / math.sin(angle)


@torch.no_grad()
def collect(
    teacher: Denoiser, distilled: Denoiser | None, points: Tensor, token_ids: Tensor, empty_ids: Tensor,
    ladder: Ladder, guidance_scale: float,
) -> Trajectories:  # fmt: skip
    """Follow trajectories from the noise ``points`` (N, 8, h, w) and record the teacher's target velocities.

    The path is the distilled model's, or the teacher's if ``distilled`` is None. The targets are recorded at every
    timestep of the distilled model.
    """
    visited, targets = [], []
    with torch.autocast(points.device.type, dtype=torch.bfloat16):
        cond, uncond = (teacher.text_encoder(ids).last_hidden_state for ids in (token_ids, empty_ids))
        both = torch.cat([cond, uncond.expand_as(cond)])
        for index, (timestep, angle) in enumerate(zip(ladder.timesteps, ladder.turns(), strict=True)):
            goal = points
            for fine, small_angle in ladder.steps(index):
                with_text, without = teacher.unet(goal.repeat(2, 1, 1, 1), fine, both).sample.float().chunk(2)
                goal = ddim_step(goal, without + guidance_scale * (with_text - without), small_angle)
            visited.append(points.half().cpu())
            targets.append(velocity_to(points, goal, angle).half().cpu())
            predicted = None if distilled is None else distilled.unet(points, timestep, cond).sample.float()
            points = goal if predicted is None else ddim_step(points, predicted, angle)
    return Trajectories(torch.stack(visited, 1), torch.stack(targets, 1), token_ids.cpu())


OUTER = ("conv_in", "conv_out", "time_embedding")  # small layers that LCM-LoRA leaves out too
COLLECT_ROWS = 32
ADAPTER_FILE = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True)
class DistillSettings(TrainSettings):
    """Settings of the distillation. 900 iterations of 64 points take about 20 minutes on two CPU cores.

    A third of that time goes into collecting trajectories.

    rank            of every low-rank change
    guidance_scale  of the teacher
    substeps        DDIM steps of the teacher for one step of the distilled model
    trajectories    total number to train on
    rounds          equal parts in which they are collected: the first along the teacher's path at the beginning, the
                    others along the distilled model's path, evenly over the first half of the iterations
    """

    warmup: int = 50
    decay_share: float = 0.5
    checkpoint_every: int = 100
    rank: int = 56
    guidance_scale: float = 3.0
    substeps: int = 3
    trajectories: int = 2400
    rounds: int = 4


class LowRankChange(nn.Module):
    """Trainable low-rank change ``up @ down`` of the matrices and kernels of a UNet or text encoder; initially zero.

    The outer layers of a UNet are left out. ``down`` (rank, in * kh * kw) and ``up`` (out, rank) are in the order of
    ``layers``.
    """

    def __init__(self, network: nn.Module, rank: int) -> None:
        super().__init__()
        shapes = {name: shape_of(layer) for name, layer in adaptable(network).items() if not name.startswith(OUTER)}
        self.layers = [*shapes]
        self.kernels = {name: shape[1:] for name, shape in shapes.items()}
        self.down = nn.ParameterList(torch.empty(rank, math.prod(shape[1:])) for shape in shapes.values())
        self.up = nn.ParameterList(torch.zeros(shape[0], rank) for shape in shapes.values())
        for down in self.down:
            nn.init.kaiming_uniform_(down, a=math.sqrt(5))

    def weights(self, network: nn.Module) -> dict[str, Tensor]:
        """Return the changed weights by name, differentiable in the change."""
        changes = zip(self.layers, self.down, self.up, strict=True)
        return {
            f"{layer}.weight": (base := network.get_parameter(f"{layer}.weight")) + (up @ down).view_as(base)
            for layer, down, up in changes
        }

    def with_factors(self, down: Iterable[Tensor], up: Iterable[Tensor]) -> LowRankChange:
        """Return a change of the same layers with other factors; their ranks may differ from layer to layer."""
        changed = copy.deepcopy(self)
        changed.down, changed.up = nn.ParameterList(down), nn.ParameterList(up)
        return changed

    @contextmanager
    def added_to(self, network: nn.Module) -> Iterator[None]:
        """Add the change to the outputs of the layers of ``network`` inside the ``with`` block.

        This is less work than changing the weights, which would compute their gradients too.
        """
        changes = zip(self.layers, self.down, self.up, self.kernels.values(), strict=True)
        handles = [
            network.get_submodule(name).register_forward_hook(partial(_added, down.view(-1, *kernel), up))
            for name, down, up, kernel in changes
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def velocity(self, unet: UNet2DConditionModel, points: Tensor, timesteps: Tensor, context: Tensor) -> Tensor:
        """Predict the velocity (B, 8, h, w) with the changed UNet, differentiable in the change."""
        inputs = {"encoder_hidden_states": context}
        output = torch.func.functional_call(unet, self.weights(unet), (points, timesteps), inputs)
        velocity: Tensor = output.sample
        return velocity

    @torch.no_grad()
    def merge_into(self, teacher: Denoiser) -> Denoiser:
        """Return a copy of the teacher with the change added to its weights."""
        distilled = copy.deepcopy(teacher)
        distilled.unet.load_state_dict(self.weights(teacher.unet), strict=False)
        return distilled


def apply_down(down: Tensor, layer: nn.Module, inputs: Tensor) -> Tensor:
    """Apply ``down`` (rank, in, ...) to the inputs of ``layer``, with the layer's own stride and padding."""
    if isinstance(layer, nn.Conv2d):
        return F.conv2d(inputs, down, None, layer.stride, layer.padding, layer.dilation)
    return F.linear(inputs, down)


def _added(down: Tensor, up: Tensor, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    hidden = apply_down(down, layer, args[0])
    return output + (F.conv2d(hidden, up[:, :, None, None]) if isinstance(layer, nn.Conv2d) else F.linear(hidden, up))


class TrajectoryStore:
    """Trajectories collected so far, saved per round and canvas in ``work/trajectories-<round>-<canvas>.pt``."""

    def __init__(
        self,
        settings: DistillSettings,
        work: Path,
        teacher: Denoiser,
        data: list[LatentScenes],
        tokenizer: CLIPTokenizer,
    ) -> None:
        self.settings, self._work = settings, work
        self._teacher, self._data, self._tokenizer = teacher, data, tokenizer
        self.made_from = fingerprint(teacher.unet)
        self._kept: list[Trajectories] = []
        self.ladder = Ladder(settings.substeps)

    @property
    def num_rounds(self) -> int:
        """Number of rounds collected so far."""
        return len(self._kept) // len(self._data)

    def rounds_due(self, iteration: int) -> int:
        """Return how many rounds must be collected before an iteration."""
        settings = self.settings
        each = max(1, settings.iterations // (2 * settings.rounds))
        return min(settings.rounds, 1 + iteration // each)

    def collect_round(self, distilled: Denoiser) -> None:
        """Collect the next round for every canvas, or load it if an earlier process saved it."""
        number = self.num_rounds
        total = sum(len(shelf.scenes) for shelf in self._data)
        for canvas, shelf in enumerate(self._data):
            path = self._work / f"trajectories-{number}-{canvas}.pt"
            count = math.ceil(self.settings.trajectories / self.settings.rounds * len(shelf.scenes) / total)
            saved = torch.load(path, weights_only=True) if path.is_file() else {}
            if saved.pop("made_from", None) == self.made_from and len(saved["token_ids"]) == count:
                trajectories = Trajectories(**saved)
            else:
                trajectories = self._collect(shelf, count, 1000 * number + canvas, distilled if number else None)
                keep({"made_from": self.made_from, **vars(trajectories)}, path)
            self._kept.append(trajectories)

    def _collect(self, shelf: LatentScenes, count: int, seed: int, distilled: Denoiser | None) -> Trajectories:
        settings = self.settings
        rng = random.Random(settings.seed * 1_000_003 + seed)
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        parts = []
        for start in range(0, count, COLLECT_ROWS):
            scenes = rng.choices(shelf.scenes, k=min(COLLECT_ROWS, count - start))
            ids = self._token_ids([loose_caption(scene, rng) for scene in scenes])
            noise = torch.randn((len(scenes), *shelf.latents.shape[1:]), generator=generator).to(settings.device)
            empty_ids, scale = self._token_ids([""]), settings.guidance_scale
            parts.append(collect(self._teacher, distilled, noise, ids, empty_ids, self.ladder, scale))
        columns = [torch.cat(column) for column in zip(*(vars(part).values() for part in parts), strict=True)]
        return Trajectories(*columns)

    def _token_ids(self, words: list[str]) -> Tensor:
        padded = self._tokenizer(words, padding="max_length", truncation=True, return_tensors="pt")
        ids: Tensor = padded.input_ids
        return ids.to(self.settings.device)

    def batch(self, rng: random.Random) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw a batch from one canvas in which every step is equally frequent.

        Returns:
            Points and velocities, each (B, 8, h, w), step indices (B,) and token ids (B, MAX_TOKENS).
        """
        canvases = [trajectories.points for trajectories in self._kept]
        canvas, indices = draw_rows(rng, canvases, self.settings.batch_size, min_rows=NUM_STEPS)
        trajectories, rows, steps = self._kept[canvas], torch.tensor(indices), torch.arange(len(indices)) % NUM_STEPS
        taken = (
            trajectories.points[rows, steps].float(),
            trajectories.velocities[rows, steps].float(),
            steps,
            trajectories.token_ids[rows],
        )
        points, velocities, steps, ids = (tensor.to(self.settings.device) for tensor in taken)
        return points, velocities, steps, ids


def distill(
    settings: DistillSettings,
    work: Path,
    teacher: Denoiser,
    data: list[LatentScenes],
    tokenizer: CLIPTokenizer,
    look: Look[Denoiser] | None = None,
    look_every: int = 200,
) -> LowRankChange:
    """Train the low-rank change, resuming from ``work/distill.pt``.

    Of ``data``, the scenes and the shapes of the latents are used. ``look`` is called with the teacher after merging
    the change.
    """
    torch.manual_seed(settings.seed)
    teacher = copy.deepcopy(teacher).to(settings.device).eval().requires_grad_(False)
    change = LowRankChange(teacher.unet, settings.rank).to(settings.device)
    store = TrajectoryStore(settings, work, teacher, data, tokenizer)
    run = Run("distill", change, settings, work, [adamw(change.parameters(), settings)], made_from=store.made_from)
    started = time.perf_counter()
    _collect_due(store, run, teacher)
    run.seconds += time.perf_counter() - started
    rng = random.Random(settings.seed + run.iteration)
    timesteps = torch.tensor(store.ladder.timesteps, device=settings.device)
    weights = torch.tensor(store.ladder.turns(), device=settings.device).sin().square()

    def losses() -> list[Tensor]:
        _collect_due(store, run, teacher)
        points, velocities, steps, ids = store.batch(rng)
        with run.autocast():
            with torch.no_grad():
                context = teacher.text_encoder(ids).last_hidden_state
            guess = change.velocity(teacher.unet, points, timesteps[steps], context).float()
        error = (guess - velocities).square().mean(dim=(1, 2, 3))
        return [(error * weights[steps] / weights.mean()).mean()]

    def look_merged(average: LowRankChange, iteration: int) -> None:
        if look is not None:
            look(average.merge_into(teacher), iteration)

    return run.train(losses, look_merged, look_every)


def _collect_due(store: TrajectoryStore, run: Run[LowRankChange], teacher: Denoiser) -> None:
    """Collect the rounds that are due, and count their operations in the bill."""
    while store.num_rounds < store.rounds_due(run.iteration):
        with FlopCounterMode(display=False) as counter:
            store.collect_round(run.average.merge_into(teacher))
        run.flops += counter.get_total_flops()


def save_adapter(directory: Path, change: LowRankChange, base: str = "embedded") -> Path:
    """Write the trained change as a directory for ``load_model`` and for diffusers' load_lora_weights.

    Factors are saved in 16 bits without an alpha (the scale is one). ``base`` is "embedded" or the path of a diffusers
    directory, relative to this one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_lora(directory / ADAPTER_FILE, {"unet": change})
    build_scheduler().save_pretrained(directory / "scheduler")
    spec = {"base": base, "sampler": "ddim", "num_steps": NUM_STEPS, "guidance_scale": 1.0}
    (directory / "adapter.json").write_text(json.dumps(spec, indent=2) + "\n", encoding="utf-8")
    return directory


def load_adapter(directory: Path, unet: UNet2DConditionModel) -> LowRankChange:
    """Load the change of ``unet`` from a directory written by :func:`save_adapter`."""
    file = directory / ADAPTER_FILE
    if not file.is_file():
        raise ConfigError(f"{file} does not exist: name the directory of an adapter that `train distill` wrote.")
    halves, change = load_file(file), LowRankChange(unet, rank=1)
    names = [f"unet.{layer}.lora_" for layer in change.layers]
    down, up = ([halves[f"{name}{half}.weight"].float().flatten(1) for name in names] for half in "AB")
    return change.with_factors(down, up)


def save_lora(path: Path, changes: Mapping[str, LowRankChange], words: str = "") -> None:
    """Write the changes of components ("unet", "text_encoder") as one LoRA file in 16 bits.

    ``words`` go into the metadata. There is no alpha: the scale is one.
    """
    halves = {}
    for component, change in changes.items():
        for layer, down, up in zip(change.layers, change.down, change.up, strict=True):
            kernel, name = change.kernels[layer], f"{component}.{layer}"
            shaped = down.view(-1, *kernel), up.view(*up.shape, *(1 for _ in kernel[1:]))
            for half, tensor in zip("AB", shaped, strict=True):
                halves[f"{name}.lora_{half}.weight"] = tensor.detach().cpu().half().contiguous()
    save_file(halves, path, metadata={"format": "pt"} | ({WORDS_KEY: words} if words else {}))
