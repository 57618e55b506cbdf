"""The upscaler stage: a compact network that enlarges images of the embedded world fourfold, from 128 to 512 px.

The truths are scenes rendered at 512 px with the sprites of :mod:`diffserve.training.upscaler_sprites`. The inputs are
the same scenes as the embedded model learned them (``world.render`` at 128 px), reduced truths (mean, Lanczos and
bicubic), and scenes that went through the embedded model's autoencoder with a little noise, which resemble generated
images most.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn

from diffserve.models.upscalers import CompactShape
from diffserve.runtime.upscaling.compact import Compact
from diffserve.training.training_loop import Look, Run, TrainSettings, muon_and_adamw
from diffserve.training.upscaler_sprites import FACTOR, render_large
from diffserve.training.vae_training import to_unit
from diffserve.world.render import render
from diffserve.world.scenes import CANVAS_PX, Scene, scenes

SHAPE: Final = CompactShape(features=64, num_convs=12, scale=FACTOR)
CROP_PX: Final = 40
POOL_SCENES: Final = 192
"""Scenes in memory, from which crops are cut."""
NEW_SCENES: Final = 1
"""Scenes of the pool replaced in each iteration."""
ROUND_TRIP_SHARE: Final = 0.45
REDUCED_SHARE: Final = 0.2
MAX_LATENT_NOISE: Final = 0.15
OBJECT_SHARE: Final = 0.9
"""Share of crops near an object; the others are anywhere."""
FILTERS: Final = (Image.Resampling.BOX, Image.Resampling.LANCZOS, Image.Resampling.BICUBIC)
CHARBONNIER_EPSILON: Final = 1e-3


@torch.inference_mode()
def round_trip(vae: AutoencoderKL, pixels: NDArray[np.uint8], noise: float = 0.0) -> NDArray[np.uint8]:
    """Encode and decode images (B, H, W, 3) with normal noise of standard deviation ``noise`` on their latents."""
    with torch.autocast(vae.device.type, dtype=torch.bfloat16):
        latents = vae.encode(to_unit(pixels).to(vae.device)).latent_dist.mode()
        decoded = vae.decode(latents + noise * torch.randn_like(latents)).sample
    unit = decoded.float().clamp(-1, 1).add(1).mul(127.5).round()
    pixels = unit.byte().permute(0, 2, 3, 1).cpu().numpy()
    return pixels


def reduce(pixels: NDArray[np.uint8], resampling: Image.Resampling) -> NDArray[np.uint8]:
    """Reduce an image (H, W, 3) by ``FACTOR`` in both directions."""
    size = (pixels.shape[1] // FACTOR, pixels.shape[0] // FACTOR)
    return np.asarray(Image.fromarray(pixels).resize(size, resampling))


def pairs(vae: AutoencoderKL, seed: int) -> Iterator[tuple[Scene, NDArray[np.uint8], NDArray[np.uint8]]]:
    """Yield endless training scenes with an input (128, 128, 3) and its truth (512, 512, 3)."""
    rng = random.Random(seed)
    for scene in scenes(seed, held_out=False):
        truth, draw = render_large(scene), rng.random()
        if draw < REDUCED_SHARE:
            yield scene, reduce(truth, rng.choice(FILTERS)), truth
            continue
        small = render(scene)
        if draw < REDUCED_SHARE + ROUND_TRIP_SHARE:
            small = round_trip(vae, small[None], rng.random() * MAX_LATENT_NOISE)[0]
        yield scene, small, truth


def batches(vae: AutoencoderKL, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless batches of crops in 0..1: inputs (B, 3, 40, 40) and truths (B, 3, 160, 160)."""
    rng, source = random.Random(seed + 1), pairs(vae, seed)
    pool = [next(source) for _ in range(POOL_SCENES)]
    while True:
        for _ in range(NEW_SCENES):
            pool[rng.randrange(POOL_SCENES)] = next(source)
        inputs, truths = [], []
        for scene, small, truth in rng.sample(pool, batch_size):
            x, y = _corner(scene, rng)
            inputs.append(small[y : y + CROP_PX, x : x + CROP_PX])
            large = FACTOR * CROP_PX
            truths.append(truth[FACTOR * y : FACTOR * y + large, FACTOR * x : FACTOR * x + large])
        yield tuple(  # type: ignore[misc]
            torch.from_numpy(np.stack(part)).permute(0, 3, 1, 2).float().div_(255) for part in (inputs, truths)
        )


def _corner(scene: Scene, rng: random.Random) -> tuple[int, int]:
    """Draw the upper left corner of a crop, usually one that shows a part of an object."""
    room = CANVAS_PX - CROP_PX
    if rng.random() >= OBJECT_SHARE:
        return rng.randint(0, room), rng.randint(0, room)
    placed = rng.choice(scene.objects)
    reach = placed.size_px // 2
    spots = (at + rng.randint(-reach, reach) - CROP_PX // 2 for at in (placed.x_px, placed.y_px))
    x, y = (min(room, max(0, spot)) for spot in spots)
    return x, y


def build_upscaler() -> Compact:
    """Build the network, with its last layer near zero: it begins as nearest-neighbor enlargement."""
    net = Compact(SHAPE)
    for layer in net.body:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, a=0.25)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    last: nn.Conv2d = net.body[-1]  # type: ignore[assignment]
    nn.init.normal_(last.weight, std=1e-3)
    return net


@torch.inference_mode()
def enlarge_by(net: Compact, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Enlarge an image (H, W, 3) by a network on any device."""
    parameter = next(net.parameters())
    x = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].to(parameter) / 255
    large: NDArray[np.uint8] = net(x)[0].float().clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).cpu().numpy()
    return large


def charbonnier(painted: Tensor, truth: Tensor) -> Tensor:
    """Compute the mean of sqrt(error^2 + epsilon^2) (Charbonnier et al., 1994)."""
    return ((painted - truth).square() + CHARBONNIER_EPSILON**2).sqrt().mean()


def train_upscaler(
    settings: TrainSettings,
    work: Path,
    vae: AutoencoderKL,
    look: Look[Compact] | None = None,
    look_every: int = 500,
    *,
    made_from: str = "",
) -> Compact:
    """Train the upscaler, resuming from ``work/upscaler.pt``.

    Args:
        settings: of the stage.
        work: directory of the checkpoint.
        vae: autoencoder of the embedded model.
        look: callback with the averaged weights.
        look_every: iterations between its calls.
        made_from: fingerprint of ``vae``.

    Returns:
        The network with averaged weights.
    """
    torch.manual_seed(settings.seed)
    net = build_upscaler().train().to(settings.device)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's own types
    inner = {f"body.{2 * index}.weight" for index in range(1, SHAPE.num_convs + 1)}
    hidden = [parameter for name, parameter in net.named_parameters() if name in inner]
    optimizers = muon_and_adamw(net, hidden, settings)
    run = Run("upscaler", net, settings, work, optimizers, made_from=made_from)
    torch.manual_seed(settings.seed + 1 + run.iteration)
    source = batches(vae, settings.batch_size, settings.seed + run.iteration)

    def losses() -> list[Tensor]:
        small, truth = (part.to(settings.device, memory_format=torch.channels_last) for part in next(source))
        with run.autocast():
            painted = net(small)
        return [charbonnier(painted.float(), truth)]

    return run.train(losses, look, look_every)


def save_upscaler(net: Compact, path: Path) -> Path:
    """Write the weights in 16 bits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().half().contiguous() for name, tensor in net.state_dict().items()}
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
    return path
