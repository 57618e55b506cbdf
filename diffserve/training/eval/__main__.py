"""``python -m diffserve.training.eval``: measure the quality of the shipped models, one JSON document per command.

The distilled model is measured by ``captions --model embedded-turbo --sampler ddim --steps 4 --guidance 1``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from diffserve.api.types import DiffusionParams
from diffserve.engine import Engine
from diffserve.engine.rewriter import Rewriter
from diffserve.engine.text import TextEngine
from diffserve.models.upscalers import EMBEDDED_UPSCALER, SHIPPED
from diffserve.rewriting import TextWindow, find_rewriter
from diffserve.training.eval import adapters, captions, parts, ranges, rewriter, upscaler
from diffserve.training.eval.captions import BEST_GUIDANCE

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
Model = Annotated[str, typer.Option(help="the image model: embedded, embedded-turbo, or a directory")]
Guidance = Annotated[float, typer.Option(help="guidance scale; 1 is none")]
Out = Annotated[Path | None, typer.Option(help="also write the JSON here")]
STYLE = "embedded"
PRECISIONS = "float32,bfloat16,int8,int4"


def _show(document: dict[str, Any], out: Path | None, *, indent: int = 2) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    print(text)


@app.command(name="captions")
def evaluate_captions(
    model: Model = "embedded",
    count: int = 300,
    sampler: str = "dpmpp_2m_sde",
    steps: int = 25,
    guidance: Guidance = BEST_GUIDANCE,
    out: Out = None,
) -> None:
    """Generate held-out captions and count the correct images."""
    how = DiffusionParams(sampler=sampler, num_steps=steps, guidance_scale=guidance)
    _show(captions.evaluate(Engine.from_pretrained(model), count, how), out)


@app.command(name="ranges")
def evaluate_ranges(model: Model = "embedded", count: int = 60, out: Out = None) -> None:
    """Count correct images over guidance scales, canvases and negative prompts."""
    _show(ranges.evaluate(Engine.from_pretrained(model), count), out)


@app.command(name="adapters")
def evaluate_adapters(model: Model = "embedded", count: int = 60, out: Out = None) -> None:
    """Count correct gifts and images in sepia."""
    _show(adapters.evaluate(Engine.from_pretrained(model), count), out)


@app.command(name="parts")
def evaluate_parts(model: Model = "embedded", out: Out = None) -> None:
    """Measure the autoencoder, the preview decoder, the checker, and the time per image."""
    _show(parts.evaluate(Engine.from_pretrained(model)), out)


@app.command(name="upscaler")
def evaluate_upscaler(
    file: Annotated[Path, typer.Option(help="the upscaler")] = SHIPPED / f"{EMBEDDED_UPSCALER}.safetensors",
    count: Annotated[int, typer.Option(help="held-out scenes")] = upscaler.NUM_SCENES,
    out: Out = None,
) -> None:
    """Compare the upscaler with Lanczos on held-out scenes."""
    _show(upscaler.evaluate(file, Engine.from_pretrained("embedded"), count), out)


@app.command(name="rewriter")
def evaluate_rewriter(
    model: Model = "embedded",
    language_model: Annotated[str, typer.Option("--rewriter", help="embedded, or a directory")] = "embedded",
    count: Annotated[int, typer.Option(help="held-out wishes")] = 200,
    num_captions: Annotated[int, typer.Option("--captions", help="held-out captions")] = 200,
    steps: int = 30,
    guidance: Guidance = BEST_GUIDANCE,
    out: Out = None,
) -> None:
    """Generate held-out wishes and captions with and without rewriting."""
    engine = Engine.from_pretrained(model)
    texts = TextEngine.from_pretrained(find_rewriter(language_model))
    writer = Rewriter(texts, style=STYLE, window=TextWindow.of(engine.model.text))
    how = DiffusionParams(sampler="ddim", num_steps=steps, guidance_scale=guidance)
    _show(rewriter.evaluate(engine, writer, how, num_wishes=count, num_captions=num_captions), out, indent=1)


@app.command(name="precisions")
def evaluate_precisions(
    names: Annotated[str, typer.Option(help="the reference, then what is held against it")] = PRECISIONS,
    count: Annotated[int, typer.Option(help="held-out wishes")] = 200,
    out: Out = None,
) -> None:
    """Measure the rewriter's perplexity at lower precision; exit code 3 if it rises by more than is allowed."""
    document = rewriter.evaluate_precisions(names.split(","), count)
    _show(document, out)
    if not all(result["passes"] for result in document["precisions"].values()):
        raise typer.Exit(3)


if __name__ == "__main__":
    app()
