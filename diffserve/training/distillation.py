"""Stage four, distillation: a LoRA over the trained UNet that paints in four steps without guidance.

Progressive distillation (Salimans & Ho, 2022, arXiv 2202.00512, section 3) straight to four steps, with the guidance
distilled along (Meng et al., 2023, arXiv 2210.03142), into low-rank changes of the weights as in LCM-LoRA (Luo et al.,
2023, arXiv 2311.05556). The distilled model visits four timesteps and no others: the trailing ones, 999, 749, 499 and
249. From each point x that it visits, the teacher takes several guided DDIM steps to the next of them, x'; learnt is
the one velocity that takes it there in a single step. An error of that velocity moves the next point by sin(d) times as
much, d being the angle of the step (see ``trajectories``): the loss is weighted with the square of that.

Points come from whole trajectories that begin in pure noise, since that is where painting begins: first the teacher's
own, later the distilled model's, whose mistakes the teacher thus shows how to mend (Ross et al., 2011, "DAgger").
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
from diffserve.training.trajectories import NUM_STEPS, Ladder, Trajectories, collect
from diffserve.world.captions import loose_caption

OUTER = ("conv_in", "conv_out", "time_embedding")  # small layers that LCM-LoRA leaves alone too
COLLECT_ROWS = 32
ADAPTER_FILE = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True)
class DistillSettings(TrainSettings):
    """How a model is distilled. 900 iterations of 64 points are laid out for 20 minutes on two CPU cores, a third of
    them for the trajectories.

    rank            of every low-rank change
    guidance_scale  the teacher's
    substeps        DDIM steps that the teacher takes for one of the distilled model's
    trajectories    how many are learnt from, in all
    rounds          they are collected in as many equal parts: the first along the teacher's path, at the beginning, the
                    others along the distilled model's, evenly over the first half of the iterations
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
    """``up @ down`` for every matrix and kernel of a UNet but the outer ones, or of a text encoder; zero when made.

    ``down`` (rank, in * kh * kw) and ``up`` (out, rank) stand in the order of ``layers``.
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
        """Name -> changed weight, differentiable in the change."""
        changes = zip(self.layers, self.down, self.up, strict=True)
        return {
            f"{layer}.weight": (base := network.get_parameter(f"{layer}.weight")) + (up @ down).view_as(base)
            for layer, down, up in changes
        }

    def with_factors(self, down: Iterable[Tensor], up: Iterable[Tensor]) -> LowRankChange:
        """A change of the same layers with other factors, whose rank may differ from layer to layer."""
        changed = copy.deepcopy(self)
        changed.down, changed.up = nn.ParameterList(down), nn.ParameterList(up)
        return changed

    @contextmanager
    def beside(self, network: nn.Module) -> Iterator[None]:
        """While it lasts, the layers of ``network`` add what the change makes of their inputs: less work than changing
        the weights, whose own gradients would be computed too.
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
        """The changed UNet's answer (B, 8, h, w), differentiable in the change."""
        inputs = {"encoder_hidden_states": context}
        output = torch.func.functional_call(unet, self.weights(unet), (points, timesteps), inputs)
        velocity: Tensor = output.sample
        return velocity

    @torch.no_grad()
    def merge_into(self, teacher: Denoiser) -> Denoiser:
        """A copy of the teacher with the change in its weights."""
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
    """The trajectories collected so far, those of a round and canvas in ``work/trajectories-<round>-<canvas>.pt``."""

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
        """Rounds collected so far."""
        return len(self._kept) // len(self._data)

    def rounds_due(self, iteration: int) -> int:
        """How many rounds should be there before an iteration."""
        settings = self.settings
        each = max(1, settings.iterations // (2 * settings.rounds))
        return min(settings.rounds, 1 + iteration // each)

    def collect_round(self, distilled: Denoiser) -> None:
        """Collect the next round of every canvas, or read it where an earlier process has kept it."""
        number = self.num_rounds
        total = sum(len(shelf.scenes) for shelf in self._data)
        for canvas, shelf in enumerate(self._data):
            path = self._work / f"trajectories-{number}-{canvas}.pt"
            count = math.ceil(self.settings.trajectories / self.settings.rounds * len(shelf.scenes) / total)
            kept = torch.load(path, weights_only=True) if path.is_file() else {}
            if kept.pop("made_from", None) == self.made_from and len(kept["token_ids"]) == count:
                found = Trajectories(**kept)
            else:
                found = self._collect(shelf, count, 1000 * number + canvas, distilled if number else None)
                keep({"made_from": self.made_from, **vars(found)}, path)
            self._kept.append(found)

    def _collect(self, shelf: LatentScenes, count: int, seed: int, distilled: Denoiser | None) -> Trajectories:
        settings = self.settings
        rng = random.Random(settings.seed * 1_000_003 + seed)
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        parts = []
        for start in range(0, count, COLLECT_ROWS):
            chosen = rng.choices(shelf.scenes, k=min(COLLECT_ROWS, count - start))
            ids = self._token_ids([loose_caption(scene, rng) for scene in chosen])
            noise = torch.randn((len(chosen), *shelf.latents.shape[1:]), generator=generator).to(settings.device)
            empty_ids, scale = self._token_ids([""]), settings.guidance_scale
            parts.append(collect(self._teacher, distilled, noise, ids, empty_ids, self.ladder, scale))
        columns = [torch.cat(column) for column in zip(*(vars(part).values() for part in parts), strict=True)]
        return Trajectories(*columns)

    def _token_ids(self, words: list[str]) -> Tensor:
        padded = self._tokenizer(words, padding="max_length", truncation=True, return_tensors="pt")
        ids: Tensor = padded.input_ids
        return ids.to(self.settings.device)

    def batch(self, rng: random.Random) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Points, velocities (B, 8, h, w), step indices (B,) and token ids of one canvas, every step alike often."""
        canvases = [one.points for one in self._kept]
        canvas, chosen = draw_rows(rng, canvases, self.settings.batch_size, least=NUM_STEPS)
        kept, rows, steps = self._kept[canvas], torch.tensor(chosen), torch.arange(len(chosen)) % NUM_STEPS
        taken = (kept.points[rows, steps].float(), kept.velocities[rows, steps].float(), steps, kept.token_ids[rows])
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
    """Train the change, resuming from ``work/distill.pt``; of ``data`` the scenes and the canvases are used.

    ``look`` looks at the teacher with the change merged in.
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
    """Collect what is due by now, and put its operations on the bill."""
    while store.num_rounds < store.rounds_due(run.iteration):
        with FlopCounterMode(display=False) as counter:
            store.collect_round(run.average.merge_into(teacher))
        run.flops += counter.get_total_flops()


def save_adapter(directory: Path, change: LowRankChange, base: str = "embedded") -> Path:
    """Write the trained change as a directory that ``load_model`` takes and diffusers' load_lora_weights reads.

    16 bits; ``base`` is "embedded" or a diffusers directory, relative to this one. No alpha: the scale is one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_lora(directory / ADAPTER_FILE, {"unet": change})
    build_scheduler().save_pretrained(directory / "scheduler")
    spec = {"base": base, "sampler": "ddim", "num_steps": NUM_STEPS, "guidance_scale": 1.0}
    (directory / "adapter.json").write_text(json.dumps(spec, indent=2) + "\n", encoding="utf-8")
    return directory


def load_adapter(directory: Path, unet: UNet2DConditionModel) -> LowRankChange:
    """Read the change of ``unet`` that :func:`save_adapter` wrote."""
    file = directory / ADAPTER_FILE
    if not file.is_file():
        raise ConfigError(f"{file} does not exist: name the directory of an adapter that `train distill` wrote.")
    halves, change = load_file(file), LowRankChange(unet, rank=1)
    names = [f"unet.{layer}.lora_" for layer in change.layers]
    down, up = ([halves[f"{name}{half}.weight"].float().flatten(1) for name in names] for half in "AB")
    return change.with_factors(down, up)


def save_lora(path: Path, changes: Mapping[str, LowRankChange], words: str = "") -> None:
    """Write what changes components, "unet" or "text_encoder", as one file in 16 bits, and which ``words`` it teaches.
    No alpha: the scale is one.
    """
    halves = {}
    for component, change in changes.items():
        for layer, down, up in zip(change.layers, change.down, change.up, strict=True):
            kernel, name = change.kernels[layer], f"{component}.{layer}"
            shaped = down.view(-1, *kernel), up.view(*up.shape, *(1 for _ in kernel[1:]))
            for half, tensor in zip("AB", shaped, strict=True):
                halves[f"{name}.lora_{half}.weight"] = tensor.detach().cpu().half().contiguous()
    save_file(halves, path, metadata={"format": "pt"} | ({WORDS_KEY: words} if words else {}))
