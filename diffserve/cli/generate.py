"""``diffserve generate``: one request, a progress bar, files."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from diffserve import types
from diffserve.bounds import check
from diffserve.cli.outputs import STDOUT, plan_outputs, write_output
from diffserve.cli.start import import_libraries
from diffserve.config import Flag, Settings, load_settings
from diffserve.errors import InvalidRequest
from diffserve.images import decode_image, decode_mask, encode_image, image_format_of, resize
from diffserve.infotext import write_infotext
from diffserve.quality import QUALITIES, is_quality, steps_of
from diffserve.sizes import SizePlan, parse_size, plan_size

if TYPE_CHECKING:
    from diffserve.engine import Engine

EXIT_FAILED = 1
JPEG_QUALITY = 95
ANY_SEED = -1
"""As other tools say it."""


@dataclass(frozen=True)
class GenerateArguments:
    """What the command line asked for; ``None`` means: as the model's profile says.

    further  what ``DiffusionParams`` takes beside, by its names
    """

    prompt: str
    output: Path | None
    overwrite: bool
    negative: str
    size: str
    num_images: int
    seed: int | None
    quality: str | None
    sampler: str | None
    num_steps: int | None
    guidance_scale: float | None
    further: Mapping[str, Any]
    init: Path | None
    strength: float | None
    mask: Path | None


def run(order: GenerateArguments, *, model: str | None, config: str | None, flags: Mapping[str, Flag]) -> int:
    """Paint ``order``; the exit code (0, or 1 when an image failed). User errors are raised as DiffserveError."""
    own = {
        "model.sampler": Flag("--sampler", order.sampler),
        "model.num_steps": Flag("--steps", order.num_steps),
        "model.guidance_scale": Flag("--guidance", order.guidance_scale),
    }
    settings = load_settings(model=model, config=config, flags={**flags, **own})
    _check_quality(order)
    pictures = _read_pictures(order)
    draft = _request(order, settings, pictures, plan=None)
    files = plan_outputs(order.output, order.prompt, order.num_images, overwrite=order.overwrite)
    is_piped = order.output == STDOUT
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {settings.model.path}"):
        engine = open_engine(settings)
    if console.is_terminal:
        info = engine.info
        console.print(f"{info.model_id} on {info.device} in {info.dtype}: {info.choice_reason}", markup=False)
    plan = _plan(order, engine, draft.init_image)
    steps = None if order.quality is None else steps_of(order.quality, engine.info)
    request = _request(order, settings, pictures, plan=plan, num_steps=steps)
    with _progress(console) as progress:
        lines, num_failed = _paint(engine, request, plan, files, progress)
    if engine.info.world is not None and engine.info.world.unknown_words(order.prompt):
        _note(console, f"in its own words, where it finds any: diffserve rewrite {shlex.quote(order.prompt)}")
    for line in lines:
        print(line, file=sys.stderr if is_piped else sys.stdout)
    return EXIT_FAILED if num_failed else 0


def open_engine(settings: Settings) -> Engine:
    """The engine with the configured model; torch is imported here and not before."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import_libraries()
    from diffserve.engine import Engine

    model = settings.model
    return Engine.from_pretrained(
        model.path, dtype=model.dtype, device=model.device, config=settings.engine, profile=model
    )


def _check_quality(order: GenerateArguments) -> None:
    if order.quality is None:
        return
    unknown = f"--quality is {order.quality!r}; choose one of {', '.join(QUALITIES)}."
    check(is_quality(order.quality), unknown, "--quality")
    twice = f"--quality is {order.quality} and --steps {order.num_steps}; they say the same, give one of them."
    check(order.num_steps is None, twice, "--quality")


def _plan(order: GenerateArguments, engine: Engine, init: types.Picture | None) -> SizePlan:
    size = parse_size(order.size)
    if init is None:
        return plan_size(engine.info, size)
    if size is not None:
        return plan_size(engine.info, size, may_pad=False)
    try:
        return plan_size(engine.info, (init.width_px, init.height_px), may_pad=False)
    except InvalidRequest as error:
        raise InvalidRequest(f"of --init, the {error.message} Give --size.", param="--init") from None


def _read_pictures(order: GenerateArguments) -> tuple[types.Picture | None, types.Picture | None]:
    init = mask = None
    if order.init is not None:
        init = decode_image(_read(order.init, "--init"), name=f"--init {str(order.init)!r}")
    if order.mask is not None:
        mask = decode_mask(_read(order.mask, "--mask"), name=f"--mask {str(order.mask)!r}")
    if init is None and order.strength is not None:
        raise InvalidRequest(
            f"--strength is {order.strength:g} without --init; it says how much of that picture is repainted.",
            param="--strength",
        )
    if init is None and mask is not None:
        raise InvalidRequest("--mask is given without --init; it says where that picture is repainted.", param="--mask")
    if init is not None and mask is not None and (init.width_px, init.height_px) != (mask.width_px, mask.height_px):
        raise InvalidRequest(
            f"--mask is {mask.width_px}x{mask.height_px} and --init {init.width_px}x{init.height_px}; "
            "they must have the same size.",
            param="--mask",
        )
    return init, mask


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read {option} {str(path)!r}: {error.strerror}.", param=option) from error


def _request(
    order: GenerateArguments,
    settings: Settings,
    pictures: tuple[types.Picture | None, types.Picture | None],
    plan: SizePlan | None,
    num_steps: int | None = None,
) -> types.GenerationRequest:
    """The engine's request; without ``plan`` a draft at the native size, built only to be checked early.

    ``num_steps``: those of a quality; else as the settings say.
    """
    init, mask = pictures
    width, height = (None, None) if plan is None else (plan.paint_width_px, plan.paint_height_px)
    if width is not None and height is not None:
        init = None if init is None else resize(init, width, height)
        mask = None if mask is None else resize(mask, width, height)
    parse_size(order.size)
    defaults = settings.model.diffusion
    return types.GenerationRequest(
        prompt=order.prompt,
        negative_prompt=order.negative,
        width_px=width,
        height_px=height,
        num_images=order.num_images,
        seed=None if order.seed == ANY_SEED else order.seed,
        init_image=init,
        mask_image=mask,
        diffusion=types.DiffusionParams(
            sampler=defaults.sampler,
            num_steps=num_steps or defaults.num_steps,
            spacing=defaults.spacing,
            **order.further,
            guidance_scale=defaults.guidance_scale,
            strength=defaults.strength if order.strength is None else order.strength,
        ),
    )


def _progress(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps {task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _paint(
    engine: Engine, request: types.GenerationRequest, plan: SizePlan, files: list[Path], progress: Progress
) -> tuple[list[str], int]:
    """Follow the engine's events: move the bar, write each image as it is painted, report each failure.

    Returns a line for each image written and the number of images that failed.
    """
    started = time.perf_counter()
    steps_done: dict[int, int] = {}
    bar = progress.add_task("painting", total=None, speed="")
    lines: list[str] = []
    notes = [plan.warning] if plan.warning else []
    num_failed = 0
    for event in engine.stream(request):
        match event:
            case types.Accepted(warnings=warnings):
                notes += warnings
            case types.Progress(image_index=index, step_index=step, num_steps=num_steps):
                _note(progress.console, *notes)
                notes.clear()
                steps_done[index] = step
                done = sum(steps_done.values())
                speed = f"{done / (time.perf_counter() - started):.1f}/s"
                progress.update(bar, completed=done, total=num_steps * request.num_images, speed=speed)
            case types.Painted(result=result):
                lines.append(_write(result, plan, files[result.image_index]))
            case types.ImageFailed(image_index=index, message=message):
                num_failed += 1
                notes.append(f"image {index} failed: {message}")
            case types.Failed(message=message, param=param):
                if param is not None:  # the caller's mistake, found late
                    raise InvalidRequest(message, param=param)
                notes.append(f"nothing was painted: {message}")
                num_failed = request.num_images
            case _:
                pass
    _note(progress.console, *notes)
    return lines, num_failed


def _write(result: types.ImageResult, plan: SizePlan, file: Path) -> str:
    """Write one image, with how it was painted inside; the line to print about it."""
    picture = plan.deliver(result.picture)
    infotext = write_infotext(result, width_px=plan.width_px, height_px=plan.height_px)
    data = encode_image(
        picture,
        image_format="png" if file == STDOUT else image_format_of(file),
        quality=JPEG_QUALITY,
        infotext=infotext,
    )
    write_output(file, data)
    timings = result.timings
    sampler = f"{result.sampler} {result.sigma_schedule}" if result.sigma_schedule else result.sampler
    count = "1 step" if result.num_steps == 1 else f"{result.num_steps} steps"
    part = "" if result.strength is None else f" at strength {result.strength:g}"
    if result.similarity is not None:
        part += f", without the first {result.skipped_steps}, from a prompt {result.similarity:g} similar"
    return (
        f"{file}  seed {result.seed}  {count} of {sampler}{part}, "
        f"{1000 * timings.step_s:.1f} ms a step, {timings.denoise_s + timings.decode_s:.2f} s in all"
    )


def _note(console: Console, *messages: str) -> None:
    for message in messages:
        console.print(f"note: {message}", style="yellow", markup=False, soft_wrap=True)
