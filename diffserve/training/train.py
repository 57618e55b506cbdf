"""The recipe of the embedded model: ``python -m diffserve.training.train all``.

Stages, each resumable from its checkpoint in ``--work``: atlas (needs the emoji font; its output ships), vae, denoiser
(with its tokenizer), tune, preview, distill (which truncates), upscaler (its sprites ship), rewriter, card. Each stage
writes a bill of its time and operations next to its checkpoint. CUDA is used where available. ``--start`` continues
from exported weights.

The shipped weights were trained in several runs with changing settings (``training.json`` lists them). The recipe here
is one run of the same total length with the final settings, followed by ``finish`` and ``tune`` as they were run. To
continue tuning the shipped weights and ship the result:

    train tune --work DIR --start diffserve/embedded/weights --minutes 60
    train distill --work DIR
    train card --work DIR
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from diffusers import AutoencoderKL
from transformers import CLIPTokenizer

from diffserve.api.errors import DiffserveError
from diffserve.models.upscalers import EMBEDDED_UPSCALER, OWN_UPSCALERS
from diffserve.runtime.model import OWN_LORAS
from diffserve.runtime.precision import choose_device
from diffserve.runtime.upscaling.compact import Compact
from diffserve.runtime.vae.preview import PreviewDecoder
from diffserve.training import card as model_card
from diffserve.training import distillation, samples, truncation
from diffserve.training.adapters import LESSONS, lessons_held_out, train_adapter
from diffserve.training.denoiser_training import Denoiser, continue_denoiser, train_denoiser, train_tokenizer
from diffserve.training.eval.captions import BEST_GUIDANCE
from diffserve.training.eval.upscaler import compare
from diffserve.training.export import export, fold_normalisation
from diffserve.training.latents import LatentScenes, channel_statistics, encode_scenes, normalise, tuning_scenes
from diffserve.training.preview_training import fidelity_db, save_preview, train_preview
from diffserve.training.rewriter_model import export_rewriter
from diffserve.training.rewriter_training import SHIPPED as REWRITER
from diffserve.training.rewriter_training import score_rewriter, train_rewriter
from diffserve.training.training_loop import Look, TrainSettings, fingerprint
from diffserve.training.upscaler_sprites import build_sprites
from diffserve.training.upscaler_training import enlarge_by, save_upscaler, train_upscaler
from diffserve.training.vae_training import round_trip_db, train_vae
from diffserve.world.captions import held_out
from diffserve.world.render import build_atlas
from diffserve.world.scenes import Scene

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
Work = Annotated[Path, typer.Option(help="where checkpoints, latents and sample sheets are kept")]
WORK = Path("runs/embedded")
Device = Annotated[str, typer.Option(callback=lambda name: str(choose_device(name).device), help="auto, cpu or cuda")]
DEVICE = "auto"
TUNING_SCENES = 20_000
FULL_TURBO = "turbo-full"
Start = Annotated[Path | None, typer.Option(help="begin from the weights in this directory instead of from nothing")]


@dataclass(frozen=True)
class Materials:
    """Inputs of the stages after the autoencoder.

    vae        with its normalisation folded in
    made_from  the fingerprint of the autoencoder before that
    data       scenes with normalised latents
    tokenizer  of captions
    """

    vae: AutoencoderKL
    made_from: str
    data: list[LatentScenes]
    tokenizer: CLIPTokenizer


def materials(work: Path, device: str, *, num_scenes: int = 48_000, start: Path | None = None) -> Materials:
    """Build or load the inputs of the later stages; the autoencoder is trained first if needed."""
    tokenizer = CLIPTokenizer.from_pretrained(train_tokenizer(work / "tokenizer"))
    raw = vae(work, device, start=start)
    made_from = fingerprint(raw)
    encoded = encode_scenes(raw, work, num_scenes=num_scenes, seed=1, device=device)
    mean, std = channel_statistics(encoded[0].latents)
    folded = fold_normalisation(raw.cpu(), mean, std).to(device)
    data = [LatentScenes(shelf.scenes, normalise(shelf.latents, mean, std).half()) for shelf in encoded]
    return Materials(folded, made_from, data, tokenizer)


def tuning_materials(work: Path, device: str, *, num_scenes: int = TUNING_SCENES) -> Materials:
    """Load the inputs of ``tune`` and of ``distill`` after it.

    Tokenizer and autoencoder come from ``work/untuned``, the scenes from :func:`tuning_scenes`.
    """
    begin = work / "untuned"
    tokenizer = CLIPTokenizer.from_pretrained(begin / "tokenizer")
    autoencoder = AutoencoderKL.from_pretrained(begin / "vae", torch_dtype=torch.float32).to(device).eval()
    data = encode_scenes(autoencoder, work, num_scenes=num_scenes, seed=3, device=device, stream=tuning_scenes)
    return Materials(autoencoder, fingerprint(autoencoder), data, tokenizer)


def exported_denoiser(weights: Path, tokenizer: CLIPTokenizer, device: str) -> Denoiser:
    """Load the denoiser from a directory of exported weights."""
    net = Denoiser(tokenizer)
    net.load(weights, tokenizer)
    return net.to(device).eval()


def look_at_samples(
    stage: str,
    inputs: Materials,
    work: Path,
    *,
    done: int = 0,
    truth: list[tuple[Scene, str]] | None = None,
    **how: Any,
) -> Look[Denoiser]:
    """Return a callback that saves a sheet of held-out captions and prints its quick score.

    Args:
        stage: prefix of the sheet's file name.
        inputs: autoencoder and tokenizer.
        work: directory of the sheets.
        done: iterations of earlier runs of this stage.
        truth: scenes with captions; by default held-out ones.
        **how: options of :func:`samples.paint`.
    """
    truth = truth or held_out(48)

    def look(net: Denoiser, iteration: int) -> None:
        words = [words for _, words in truth]
        pictures = samples.paint(net, inputs.vae, inputs.tokenizer, words, **how)
        samples.sheet([*pictures], 8, work / f"{stage}-{done + iteration:06d}.png")
        print(f"{stage} {done + iteration}: {samples.quick_score(pictures, [scene for scene, _ in truth])}", flush=True)

    return look


@app.command()
def atlas() -> None:
    """Cut the sprite atlas out of the emoji font."""
    print(build_atlas())


@app.command()
def vae(
    work: Work = WORK, device: Device = DEVICE, iterations: int = 5800, batch: int = 16, start: Start = None
) -> AutoencoderKL:
    """Train the autoencoder."""
    work.mkdir(parents=True, exist_ok=True)
    settings = TrainSettings(iterations, batch, learning_rate=1e-3, device=device, ema=0.998)

    def look(net: AutoencoderKL, iteration: int) -> None:
        samples.round_trip_sheet(net, work / f"vae-{iteration:06d}.png")

    trained = train_vae(settings, work, start and start / "vae", look)
    print(f"round trip {round_trip_db(trained, seed=5):.1f} dB on held-out scenes", flush=True)
    return trained


@app.command()
def denoiser(
    work: Work = WORK,
    device: Device = DEVICE,
    iterations: int = 14_850,
    finish: int = 3_000,
    batch: int = 64,
    num_scenes: int = 48_000,
    look_every: int = 800,
    start: Start = None,
) -> None:
    """Train tokenizer, text encoder and UNet on the autoencoder's latents, then export them.

    After the first run, ``finish`` iterations continue from its weights with a new learning-rate cycle.
    """
    inputs = materials(work, device, num_scenes=num_scenes, start=start)
    settings = TrainSettings(iterations, batch, learning_rate=1e-3, device=device, decay_share=0.6)
    look = look_at_samples("denoiser", inputs, work)
    trained = train_denoiser(
        settings, work, inputs.data, inputs.tokenizer, start, look, look_every, made_from=inputs.made_from
    )
    if finish:
        settings = replace(settings, iterations=finish, warmup=80, decay_share=0.7)
        later = look_at_samples("denoiser", inputs, work, done=iterations)
        trained = continue_denoiser("finish", trained, settings, work, inputs.data, inputs.tokenizer, later, look_every)
    print(export(work / "weights", inputs.vae, trained, inputs.tokenizer))


@app.command()
def tune(
    work: Work = WORK,
    device: Device = DEVICE,
    iterations: int = 3_000,
    minutes: Annotated[float | None, typer.Option(help="end after so many, if that is sooner")] = None,
    batch: int = 64,
    num_scenes: int = TUNING_SCENES,
    look_every: int = 400,
    start: Start = None,
) -> None:
    """Tune the weights in ``start`` (or the exported ones of ``work``) on the most common prompts, then export them.

    The autoencoder stays unchanged.
    """
    begin = work / "untuned"
    if not begin.is_dir():
        part = work / "untuned.part"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(start or work / "weights", part)
        part.rename(begin)
    inputs = tuning_materials(work, device, num_scenes=num_scenes)
    settings = TrainSettings(
        iterations,
        batch,
        learning_rate=8e-4,
        device=device,
        warmup=50,
        decay_share=0.8,
        ema=0.998,
        checkpoint_every=100,
        max_seconds=minutes and 60 * minutes,
    )
    torch.manual_seed(settings.seed)  # the layout head is not exported and must be initialized identically
    first = exported_denoiser(begin, inputs.tokenizer, device)
    look = look_at_samples("tune", inputs, work)
    trained = continue_denoiser("tune", first, settings, work, inputs.data, inputs.tokenizer, look, look_every)
    if (begin / "preview").is_dir():
        shutil.copytree(begin / "preview", work / "weights" / "preview", dirs_exist_ok=True)
    print(export(work / "weights", inputs.vae, trained, inputs.tokenizer))


@app.command()
def preview(work: Work = WORK, device: Device = DEVICE, iterations: int = 1200, batch: int = 32) -> None:
    """Train the tiny decoder of live previews for the exported weights."""
    inputs = materials(work, device)
    settings = TrainSettings(iterations, batch, learning_rate=2e-3, device=device, ema=0.995)

    def look(net: PreviewDecoder, iteration: int) -> None:
        samples.preview_sheet(net, inputs.vae, work / f"preview-{iteration:06d}.png")

    trained = train_preview(settings, work, inputs.data, look, made_from=inputs.made_from)
    print(f"previews {fidelity_db(trained, inputs.vae, seed=5):.1f} dB from the autoencoder's pictures", flush=True)
    print(save_preview(trained, work / "weights" / "preview"))


@app.command()
def distill(
    work: Work = WORK, device: Device = DEVICE, iterations: int = 900, batch: int = 64, look_every: int = 300
) -> None:
    """Distill the exported denoiser into four steps without guidance."""
    inputs = tuning_materials(work, device) if (work / "untuned").is_dir() else materials(work, device)
    settings = distillation.DistillSettings(
        iterations, batch, learning_rate=1e-3, device=device, guidance_scale=BEST_GUIDANCE
    )
    teacher = exported_denoiser(work / "weights", inputs.tokenizer, device)
    look = look_at_samples("distill", inputs, work, num_steps=4, guidance_scale=1.0)
    change = distillation.distill(settings, work, teacher, inputs.data, inputs.tokenizer, look, look_every)
    distillation.save_adapter(work / FULL_TURBO, change)
    truncate(work, device)


@app.command()
def truncate(
    work: Work = WORK,
    device: Device = DEVICE,
    full: Annotated[Path | None, typer.Option(help=f"the adapter to truncate; else {FULL_TURBO} of --work")] = None,
    weights: Annotated[Path | None, typer.Option(help="the weights that it changes; else those of --work")] = None,
    max_bytes: Annotated[int, typer.Option(help="size of the truncated factors in 16 bits")] = truncation.MAX_BYTES,
) -> None:
    """Truncate the distilled model's change to the most effective ranks, layer by layer."""
    weights = weights or work / "weights"
    tokenizer = CLIPTokenizer.from_pretrained(weights / "tokenizer")
    teacher = exported_denoiser(weights, tokenizer, device).requires_grad_(False)
    change = distillation.load_adapter(full or work / FULL_TURBO, teacher.unet).to(device)
    moments = truncation.measure_moments(change, teacher, tokenizer)
    print(distillation.save_adapter(work / "turbo", truncation.truncate(change, moments, max_bytes)))


@app.command()
def adapters(
    work: Work = WORK,
    device: Device = DEVICE,
    name: Annotated[list[str], typer.Option(help="which of them")] = [*LESSONS],  # noqa: B006
    iterations: int = 1_000,
    minutes: Annotated[float | None, typer.Option(help="end each after so many, if that is sooner")] = None,
    batch: int = 8,
    rank: int = 4,
    num_scenes: int = 900,
    learning_rate: float = 2e-3,
    look_every: int = 100,
    start: Annotated[Path, typer.Option(help="the weights that they change")] = model_card.SHIPPED["weights"],
) -> None:
    """Train the small LoRA files that ship with the exported denoiser; its autoencoder stays unchanged."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = CLIPTokenizer.from_pretrained(start / "tokenizer")
    autoencoder = AutoencoderKL.from_pretrained(start / "vae", torch_dtype=torch.float32).to(device).eval()
    teacher = exported_denoiser(start, tokenizer, device)
    settings = TrainSettings(
        iterations,
        batch,
        learning_rate,
        device,
        warmup=20,
        decay_share=0.6,
        ema=0.98,
        checkpoint_every=50,
        max_seconds=minutes and 60 * minutes,
    )
    for adapter in name:
        lesson = LESSONS[adapter]
        data = encode_scenes(
            autoencoder, work, num_scenes=num_scenes, seed=11, device=device, stream=lesson.stream, draw=lesson.draw
        )
        inputs = Materials(autoencoder, fingerprint(autoencoder), data, tokenizer)
        truth = lessons_held_out(adapter, 8)
        look = look_at_samples(adapter, inputs, work, truth=truth, num_steps=12)
        change = train_adapter(adapter, settings, rank, work, teacher, data, tokenizer, look, look_every)
        folder = work / OWN_LORAS
        folder.mkdir(parents=True, exist_ok=True)
        change.save(folder / f"{adapter}.safetensors", lesson.words)


@app.command()
def sprites(icons: Annotated[list[Path], typer.Argument(help="unpacked versions of @iconify-json/noto")]) -> None:
    """Draw the sprites in four times their resolution, the truth of the upscaler."""
    print(build_sprites(icons))


@app.command()
def upscaler(
    work: Work = WORK,
    device: Device = DEVICE,
    iterations: int = 30_000,
    minutes: Annotated[float | None, typer.Option(help="end after so many, if that is sooner")] = None,
    batch: int = 12,
    learning_rate: float = 2e-3,
    look_every: int = 500,
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
    start: Annotated[Path, typer.Option(help="the model whose autoencoder is used")] = model_card.SHIPPED["weights"],
) -> None:
    """Train the upscaler of the embedded world, from 128 to 512 px."""
    work.mkdir(parents=True, exist_ok=True)
    if threads is not None:
        torch.set_num_threads(threads)
    autoencoder = AutoencoderKL.from_pretrained(start / "vae", torch_dtype=torch.float32).to(device).eval()
    settings = TrainSettings(
        iterations,
        batch,
        learning_rate,
        device,
        warmup=50,
        decay_share=0.6,
        ema=0.998,
        checkpoint_every=100,
        max_seconds=minutes and 60 * minutes,
    )

    def look(net: Compact, iteration: int) -> None:
        scored = compare(partial(enlarge_by, net), autoencoder, count=16)["inputs"]
        gains = ", ".join(f"{kind} {row['gain_db']:+.2f} dB" for kind, row in scored.items())
        print(f"upscaler {iteration}: {gains} over Lanczos", flush=True)

    made_from = fingerprint(autoencoder)
    trained = train_upscaler(settings, work, autoencoder, look, look_every, made_from=made_from)
    print(save_upscaler(trained, work / OWN_UPSCALERS / f"{EMBEDDED_UPSCALER}.safetensors"))


@app.command()
def rewriter(work: Work = WORK, device: Device = DEVICE) -> None:
    """Train the prompt rewriter on wishes, evaluate it and export it."""
    work.mkdir(parents=True, exist_ok=True)
    model, tokenizer = train_rewriter(replace(REWRITER, device=device), work)
    print(score_rewriter(model, tokenizer))
    print(export_rewriter(work / "rewriter", model, tokenizer))


@app.command()
def card(work: Work = WORK) -> None:
    """Install the trained weights into the package, evaluate them and write the model card."""
    model_card.install(work)
    model_card.measure()
    model_card.write()


@app.command(name="all")
def everything(work: Work = WORK, device: Device = DEVICE, start: Start = None) -> None:
    """Run every stage after the atlas in order."""
    torch.set_float32_matmul_precision("high")
    denoiser(work, device, start=start)
    tune(work, device, iterations=1_550)
    preview(work, device)
    distill(work, device)
    adapters(work, device, start=work / "weights")
    upscaler(work, device, iterations=5_000, start=work / "weights")
    rewriter(work, device)
    card(work)


if __name__ == "__main__":
    try:
        app()
    except DiffserveError as error:
        sys.exit(error.message)
