"""``diffserve generate``: one request, a progress bar, files."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from diffserve.api import types
from diffserve.api.bounds import check
from diffserve.api.errors import EngineUnavailable, InvalidRequest, ModerationBlocked
from diffserve.api.sizes import SizePlan, fit_controls, parse_size, plan_size
from diffserve.cli.outputs import STDOUT, plan_outputs, write_output
from diffserve.cli.start import import_libraries
from diffserve.media.images import decode_image, decode_mask, image_format_of
from diffserve.media.infotext import seeds_told, write_infotext
from diffserve.media.provenance import Marks
from diffserve.media.start_picture import StartPicture
from diffserve.media.watermark import Kind
from diffserve.models.controlnets import Control, digest_of
from diffserve.service.safety import Safety
from diffserve.settings.config import Settings
from diffserve.settings.layers import Flag, load_settings
from diffserve.settings.quality import QUALITIES, is_quality, steps_of

if TYPE_CHECKING:
    from diffserve.client import CompletedImage
    from diffserve.engine import Engine

    Painted = types.ImageResult | CompletedImage
    """What says how a picture was painted, here or by a server."""

EXIT_FAILED = 1
JPEG_QUALITY = 95
ANY_SEED = -1
"""As other tools say it."""

Controls = tuple[tuple[Control, ...], tuple[types.Picture, ...]]
"""ControlNets, and the picture of each as it was given."""


class _Output(NamedTuple):
    """Where pictures go, what they bear, and who judges them before."""

    files: list[Path]
    marks: Marks
    safety: Safety | None


@dataclass(frozen=True)
class GenerateArguments:
    """What the command line asked for; ``None`` means: as the model's profile says.

    further  what ``DiffusionParams`` takes beside, by its names
    controlnets  and where the picture of each lies
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
    best_of: int | None
    init: Path | None
    strength: float | None
    mask: Path | None
    controlnets: tuple[tuple[Control, str], ...] = ()


def run(order: GenerateArguments, *, model: str | None, config: str | None, flags: Mapping[str, Flag]) -> int:
    """Paint ``order``; the exit code (0, or 1 when an image failed). User errors are raised as DiffserveError."""
    own = {
        "model.sampler": Flag("--sampler", order.sampler),
        "model.num_steps": Flag("--steps", order.num_steps),
        "model.guidance_scale": Flag("--guidance", order.guidance_scale),
    }
    settings = load_settings(model=model, config=config, flags={**flags, **own})
    check_quality(order)
    marks = Marks.of(settings.serve)
    start, controls = read_pictures(order), _read_controls(order)
    draft = _request(order, settings, start, controls, plan=None)
    files = plan_outputs(order.output, order.prompt, order.num_images, overwrite=order.overwrite)
    console = Console(stderr=True, highlight=False)
    with Safety.running(settings) as safety:
        if safety is not None:
            safety.check_texts(draft.texts)
        return _generate(order, settings, (start, controls), _Output(files, marks, safety), console)


def _generate(
    order: GenerateArguments,
    settings: Settings,
    pictures: tuple[StartPicture | None, Controls],
    output: _Output,
    console: Console,
) -> int:
    start, controls = pictures
    with console.status(f"loading {settings.model.path}"):
        engine = open_engine(settings)
    if console.is_terminal:
        info = engine.info
        console.print(f"{info.model_id} on {info.device} in {info.dtype}: {info.choice_reason}", markup=False)
    plan = _plan(order, engine, start)
    steps = None if order.quality is None else steps_of(order.quality, engine.info)
    request = _request(order, settings, start, controls, plan=plan, num_steps=steps)
    with progress_bar(console) as progress:
        lines, num_failed = _paint(engine, request, (plan, start), output, progress)
    world, teaches = engine.info.world, bool(request.diffusion.loras)
    if world is not None and not teaches and world.unknown_words(request.prompt):
        note(console, f"in its own words, where it finds any: diffserve rewrite {shlex.quote(order.prompt)}")
    for line in lines:
        print(line, file=sys.stderr if order.output == STDOUT else sys.stdout)
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


def check_quality(order: GenerateArguments) -> None:
    """InvalidRequest where its quality is none, or beside its own number of steps."""
    if order.quality is None:
        return
    unknown = f"--quality is {order.quality!r}; choose one of {', '.join(QUALITIES)}."
    check(is_quality(order.quality), unknown, "--quality")
    twice = f"--quality is {order.quality} and --steps {order.num_steps}; they say the same, give one of them."
    check(order.num_steps is None, twice, "--quality")


def _plan(order: GenerateArguments, engine: Engine, start: StartPicture | None) -> SizePlan:
    size = parse_size(order.size)
    return plan_size(engine.info, size) if start is None else start.plan(engine.info, size)


def read_pictures(order: GenerateArguments) -> StartPicture | None:
    """What it starts from, if it does. InvalidRequest names the option."""
    mask = None
    if order.mask is not None:
        mask = decode_mask(read_bytes(order.mask, "--mask"), name=f"--mask {str(order.mask)!r}")
    if order.init is None:
        if order.strength is not None:
            said = "without --init; it says how much of that picture is repainted."
            raise InvalidRequest(f"--strength is {order.strength:g} {said}", param="--strength")
        if mask is not None:
            said = "--mask is given without --init; it says where that picture is repainted."
            raise InvalidRequest(said, param="--mask")
        return None
    picture = decode_image(read_bytes(order.init, "--init"), name=f"--init {str(order.init)!r}")
    return StartPicture(picture=picture, mask=mask, names=("--init", "--mask"))


def _read_controls(order: GenerateArguments) -> Controls:
    named, images = [], []
    for control, image in order.controlnets:
        option = f"--controlnet {control.name}"
        picture = decode_image(read_bytes(Path(image), option), name=f"{option} {image!r}")
        digest = digest_of(picture.width_px, picture.height_px, picture.data)
        named.append(msgspec.structs.replace(control, image=digest))
        images.append(picture)
    return tuple(named), tuple(images)


def read_bytes(path: Path, option: str) -> bytes:
    """The file of ``option``. InvalidRequest where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read {option} {str(path)!r}: {error.strerror}.", param=option) from error


def _request(
    order: GenerateArguments,
    settings: Settings,
    start: StartPicture | None,
    controls: Controls,
    plan: SizePlan | None,
    num_steps: int | None = None,
) -> types.GenerationRequest:
    """The engine's request; without ``plan`` a draft at the native size, built only to be checked early.

    ``num_steps``: those of a quality; else as the settings say.
    """
    named, images = controls
    width, height = (None, None) if plan is None else (plan.paint_width_px, plan.paint_height_px)
    init, mask = (None, None) if start is None else (start.picture, start.mask)
    if plan is not None and width is not None and height is not None:
        init, mask = (None, None) if start is None else start.fitted(width, height)
        images = fit_controls(named, images, (plan.width_px, plan.height_px), (width, height))
    parse_size(order.size)
    defaults = settings.model.diffusion
    return types.GenerationRequest(
        prompt=order.prompt,
        negative_prompt=order.negative,
        width_px=width,
        height_px=height,
        num_images=order.num_images,
        best_of=order.best_of,
        seed=None if order.seed == ANY_SEED else order.seed,
        init_image=init,
        mask_image=mask,
        control_images=images,
        diffusion=types.DiffusionParams(
            sampler=defaults.sampler,
            num_steps=num_steps or defaults.num_steps,
            **{"spacing": defaults.spacing, **order.further},
            controlnets=named,
            guidance_scale=defaults.guidance_scale,
            strength=defaults.strength if order.strength is None else order.strength,
        ),
    )


def progress_bar(console: Console) -> Progress:
    """A bar of steps, on a terminal."""
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
    engine: Engine,
    request: types.GenerationRequest,
    planned: tuple[SizePlan, StartPicture | None],
    output: _Output,
    progress: Progress,
) -> tuple[list[str], int]:
    """Follow the engine's events: move the bar, write each image as it is painted, report each failure.

    Returns a line for each image written and the number of images that failed.
    """
    started = time.perf_counter()
    steps_done: dict[int, int] = {}
    bar = progress.add_task("painting", total=None, speed="")
    lines: list[str] = []
    notes = [planned[0].warning] if planned[0].warning else []
    num_failed = 0
    for event in engine.stream(request):
        match event:
            case types.Accepted(warnings=warnings):
                notes += warnings
            case types.Progress(image_index=index, step_index=step, num_steps=num_steps):
                note(progress.console, *notes)
                notes.clear()
                steps_done[index] = step
                done = sum(steps_done.values())
                speed = f"{done / (time.perf_counter() - started):.1f}/s"
                progress.update(bar, completed=done, total=num_steps * request.num_painted, speed=speed)
            case types.Painted(result=result):
                try:
                    lines.append(_write(result, *planned, output))
                except (ModerationBlocked, EngineUnavailable) as error:  # by the filter, or since it is gone
                    num_failed += 1
                    notes.append(f"image {result.image_index} is withheld: {error.message}")
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
    note(progress.console, *notes)
    return lines, num_failed


def _write(result: types.ImageResult, plan: SizePlan, start: StartPicture | None, output: _Output) -> str:
    """Write one image, with how it was painted inside; the line to print about it. Raises what the filter does."""
    if output.safety is not None:
        output.safety.check(result)
    file, marks = output.files[result.image_index], output.marks
    kind: Kind = "generated" if start is None else "composite"
    sized, mark = plan.deliver(result.picture), partial(marks.mark, kind=kind)
    data = marks.write(
        mark(sized) if start is None else start.lay_around(sized, mark),
        kind=kind,
        image_format="png" if file == STDOUT else image_format_of(file),
        quality=JPEG_QUALITY,
        infotext=write_infotext(result, width_px=plan.width_px, height_px=plan.height_px),
    )
    write_output(file, data)
    timings = result.timings
    told = told_of(file, result, result.num_steps)
    return f"{told}, {1000 * timings.step_s:.1f} ms a step, {timings.denoise_s + timings.decode_s:.2f} s in all"


def told_of(file: Path, how: Painted, num_steps: int) -> str:
    """Where a picture lies, and how it was painted, in a line."""
    sampler = f"{how.sampler} {how.sigma_schedule}" if how.sigma_schedule else how.sampler
    count = "1 step" if num_steps == 1 else f"{num_steps} steps"
    part = "" if how.strength is None else f" at strength {how.strength:g}"
    if how.similarity is not None:
        part += f", without the first {how.skipped_steps}, from a prompt {how.similarity:g} similar"
    if how.refiner:
        part += f", from {how.switch_at:g} on by {how.refiner}"
    if how.score is not None:
        part += f", score {how.score:.4g}"
    return f"{file}  {seeds_told(how.seed, how.variation_seed)}  {count} of {sampler}{part}"


def note(console: Console, *messages: str) -> None:
    """A line for each of ``messages``."""
    for message in messages:
        console.print(f"note: {message}", style="yellow", markup=False, soft_wrap=True)
