"""The whole recipe of the embedded model: ``python -m diffserve.embedded.train all --work DIR``.

Stages, each resumable from its checkpoint in ``--work``: atlas (needs the emoji font; the result ships), tokenizer,
vae, latents, denoiser, export. On a GPU give ``--device cuda`` and a larger ``--batch``; the code is the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from diffusers import AutoencoderKL
from transformers import CLIPTokenizer

from diffserve.embedded import samples, sprites
from diffserve.embedded.denoiser_training import (
    Denoiser,
    LatentScenes,
    channel_statistics,
    encode_scenes,
    normalise,
    train_denoiser,
)
from diffserve.embedded.export import export, fold_normalisation
from diffserve.embedded.tokenizer import train_tokenizer
from diffserve.embedded.training import TrainSettings
from diffserve.embedded.vae_training import psnr_db, train_vae

WEIGHTS = Path(__file__).parent / "weights"

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
Work = Annotated[Path, typer.Option(help="where checkpoints, latents and sample sheets are kept")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]


@app.command()
def atlas() -> None:
    """Cut the sprite atlas out of the emoji font."""
    print(sprites.build_atlas())


@app.command()
def vae(work: Work, device: Device = "cpu", iterations: int = 2800, batch: int = 16) -> AutoencoderKL:
    """Train the autoencoder."""
    work.mkdir(parents=True, exist_ok=True)
    settings = TrainSettings(iterations, batch, learning_rate=6e-4, device=device, ema=0.998)
    trained = train_vae(settings, work)
    print(f"round trip {psnr_db(trained, seed=5):.1f} dB on held-out scenes", flush=True)
    return trained


@app.command()
def denoiser(
    work: Work,
    device: Device = "cpu",
    iterations: int = 2800,
    batch: int = 64,
    num_scenes: int = 20_000,
    look_every: int = 700,
) -> None:
    """Train tokenizer, text encoder and UNet on the trained autoencoder's latents, then export."""
    tokenizer = CLIPTokenizer.from_pretrained(train_tokenizer(work / "tokenizer"))
    raw = vae(work, device)
    data = encode_scenes(raw, work, num_scenes=num_scenes, seed=1, device=device)
    mean, std = channel_statistics(data.latents)
    folded = fold_normalisation(raw.cpu(), mean, std).to(device)
    data = LatentScenes(data.scenes, normalise(data.latents, mean, std).half())
    truth = samples.held_out(48)

    def look(net: Denoiser, iteration: int) -> None:
        pictures = samples.paint(net, folded, tokenizer, [words for _, words in truth])
        samples.sheet(pictures, 8, work / f"sheet-{iteration:06d}.png")
        print(f"denoiser {iteration}: {samples.quick_mark(pictures, [scene for scene, _ in truth])}", flush=True)

    settings = TrainSettings(iterations, batch, learning_rate=1.2e-3, device=device, decay_share=0.4)
    trained = train_denoiser(settings, work, data, tokenizer, look, look_every)
    print(export(work / "weights", folded, trained, tokenizer))


@app.command(name="all")
def everything(work: Work, device: Device = "cpu") -> None:
    """Every stage after the atlas, at the settings of the shipped weights."""
    torch.set_float32_matmul_precision("high")
    denoiser(work, device)


if __name__ == "__main__":
    app()
