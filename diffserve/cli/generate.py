"""``diffserve generate``: runs one request, shows its progress and writes the image files."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from diffserve.api import types
from diffserve.api.bounds import check
from diffserve.api.errors import EngineUnavailable, InvalidRequest, ModerationBlocked
from diffserve.api.fields import HIRES, TemplateMode
from diffserve.api.prompt_syntax import A1111, in_a1111
from diffserve.api.sizes import SizePlan, fit_controls, fit_references, parse_size, plan_hires, plan_size
from diffserve.cli.options import SettingsOptions
from diffserve.cli.outputs import STDOUT, plan_outputs, write_output
from diffserve.cli.start import import_libraries
from diffserve.media.images import decode_image, decode_mask, image_format_of
from diffserve.media.infotext import seeds_text, write_infotext
from diffserve.media.provenance import Marks
from diffserve.media.start_picture import StartPicture, read_margins
from diffserve.media.watermark import Kind
from diffserve.models.controlnets import Control, digest_of
from diffserve.models.references import Reference
from diffserve.models.templates import Wildcards, template_fields
from diffserve.service.safety import Safety
from diffserve.settings.config import Settings
from diffserve.settings.layers import Flag
from diffserve.settings.quality import QUALITIES, is_quality, with_quality
from schedulers.learned import is_learned

if TYPE_CHECKING:
    from diffserve.client import CompletedImage
    from diffserve.engine import Engine

    AnyImage = types.ImageResult | CompletedImage
    """A generated image with its parameters, from the local engine or from a server."""

EXIT_FAILED = 1
JPEG_QUALITY = 95
DEFAULT_SOLVER = ("sampler", "num_steps", "spacing")
"""Fields of a request that the settings of the model fill."""

ANY_SEED = -1
"""A random seed, as in other programs."""


Adapter = TypeVar("Adapter", Control, Reference)


class _Adapted(NamedTuple):
    """ControlNets with their control images, unscaled, and references with their images."""

    controlnets: tuple[Control, ...]
    control_images: tuple[types.Picture, ...]
    references: tuple[Reference, ...]
    reference_images: tuple[types.Picture, ...]


class _Output(NamedTuple):
    """Output files, watermark settings and safety filter of a request."""

    files: list[Path]
    marks: Marks
    safety: Safety | None


@dataclass(frozen=True)
class GenerateArguments:
    """Arguments of the command. ``None`` stands for the default of the model's profile.

    Attributes:
        further: Other fields of ``DiffusionParams``, by name.
        controlnets: ControlNets and the paths of their control images.
        references: References and the paths of their images.
        template: Template mode, a ``TemplateMode``; ``prompt`` is then not yet in A1111's syntax.
        prompt_syntax: Syntax of the resolved prompts of a template.
        prompt_fields: Fields of ``GenerationRequest`` for the prompts and the seed, once they are resolved.
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
    references: tuple[tuple[Reference, str], ...] = ()
    template: str = "off"
    prompt_syntax: str = A1111
    prompt_fields: Mapping[str, Any] = field(default_factory=dict)


def run(order: GenerateArguments, sources: SettingsOptions) -> int:
    """Generate the images of ``order`` and return the exit code: 0, or 1 if an image failed.

    Args:
        order: The arguments of the command.
        sources: Options for the settings.

    Raises:
        DiffserveError: The user made an error, such as an invalid value.
    """
    sampling_flags = {
        "model.sampler": Flag("--sampler", None if is_learned(order.sampler) else order.sampler),
        "model.num_steps": Flag("--steps", order.num_steps),
        "model.guidance_scale": Flag("--guidance", order.guidance_scale),
    }
    settings = sources.load(sampling_flags)
    check_quality(order)
    marks = Marks.of(settings.serve)
    start, adapted = read_pictures(order), _read_adapted(order)
    prompt_fields, warnings = resolve_prompt(order, settings)
    order = replace(order, prompt_fields=prompt_fields)
    draft = _request(order, settings, start, adapted, plan=None)
    files = plan_outputs(order.output, order.prompt, order.num_images, overwrite=order.overwrite)
    console = Console(stderr=True, highlight=False)
    note(console, *warnings)
    with Safety.running(settings) as safety:
        if safety is not None:
            safety.check_texts(draft.texts)
        return _generate(order, settings, (start, adapted), _Output(files, marks, safety), console)


def _generate(
    order: GenerateArguments,
    settings: Settings,
    pictures: tuple[StartPicture | None, _Adapted],
    output: _Output,
    console: Console,
) -> int:
    start, adapted = pictures
    with console.status(f"loading {settings.model.path}"):
        engine = open_engine(settings)
    if console.is_terminal:
        info = engine.info
        console.print(f"{info.model_id} on {info.device} in {info.dtype}: {info.choice_reason}", markup=False)
    plan = _plan(order, engine, start)
    request = _request(order, settings, start, adapted, plan=plan)
    request, warnings = with_quality(request, order.quality, engine.info)
    note(console, *warnings)
    request = _with_defaults(request, settings)
    with progress_bar(console) as progress:
        lines, num_failed = _paint(engine, request, (plan, start), output, progress)
    world, has_loras = engine.info.world, bool(request.diffusion.loras)
    if world is not None and not has_loras and world.unknown_words(request.prompt):
        note(console, f"to rewrite the prompt in known words, run: diffserve rewrite {shlex.quote(order.prompt)}")
    for line in lines:
        print(line, file=sys.stderr if order.output == STDOUT else sys.stdout)
    return EXIT_FAILED if num_failed else 0


def open_engine(settings: Settings) -> Engine:
    """Load the configured model and return its engine. torch is imported only here."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import_libraries()
    from diffserve.engine import Engine

    model = settings.model
    return Engine.from_pretrained(
        model.path, dtype=model.dtype, device=model.device, config=settings.engine, profile=model
    )


def check_quality(order: GenerateArguments) -> None:
    """Raise InvalidRequest if the quality is unknown or combined with a number of steps."""
    if order.quality is None:
        return
    unknown = f"--quality is {order.quality!r}; choose one of {', '.join(QUALITIES)}."
    check(is_quality(order.quality), unknown, "--quality")
    conflict = f"--quality is {order.quality} and --steps {order.num_steps}; both set the steps, give one of them."
    check(order.num_steps is None, conflict, "--quality")


def _plan(order: GenerateArguments, engine: Engine, start: StartPicture | None) -> SizePlan:
    size, is_tiled = parse_size(order.size), bool(order.further.get("tile_size"))
    if start is not None:
        return start.plan(engine.info, size, is_tiled=is_tiled)
    return plan_hires(engine.info, plan_size(engine.info, size, is_tiled=is_tiled), _hires_params(order))


def _hires_params(order: GenerateArguments) -> types.DiffusionParams:
    """Return parameters with the fields of hires fix only."""
    return types.DiffusionParams(**{name: value for name, value in order.further.items() if name.startswith(HIRES)})


def read_pictures(order: GenerateArguments) -> StartPicture | None:
    """Read the images of ``--init`` and ``--mask``; None without ``--init``.

    Raises:
        InvalidRequest: A file cannot be read, or an option needs ``--init``.
    """
    mask = None
    if order.mask is not None:
        mask = decode_mask(read_bytes(order.mask, "--mask"), name=f"--mask {str(order.mask)!r}")
    if order.init is None:
        if order.strength is not None:
            message = f"--strength is {order.strength:g} without --init; give the image to change with --init."
            raise InvalidRequest(message, param="--strength")
        if mask is not None:
            message = "--mask is given without --init; give the image to change with --init."
            raise InvalidRequest(message, param="--mask")
        return None
    picture = decode_image(read_bytes(order.init, "--init"), name=f"--init {str(order.init)!r}")
    start, margins = StartPicture(picture=picture, mask=mask, names=("--init", "--mask")), order.further.get("outpaint")
    return start if margins is None else start.extended(read_margins(margins))


def _read_adapted(order: GenerateArguments) -> _Adapted:
    controls = [_with_image(control, image, f"--controlnet {control.name}") for control, image in order.controlnets]
    references = [_with_image(reference, image, "--reference") for reference, image in order.references]
    return _Adapted(
        tuple(control for control, _ in controls),
        tuple(picture for _, picture in controls),
        tuple(reference for reference, _ in references),
        tuple(picture for _, picture in references),
    )


def _with_image(adapter: Adapter, image: str, option: str) -> tuple[Adapter, types.Picture]:
    """Return ``adapter`` with the digest of the file ``image`` of ``option``, and the decoded image."""
    picture = decode_image(read_bytes(Path(image), option), name=f"{option} {image!r}")
    digest = digest_of(picture.width_px, picture.height_px, picture.data)
    return msgspec.structs.replace(adapter, image=digest), picture


def read_bytes(path: Path, option: str) -> bytes:
    """Read the file that ``option`` names.

    Raises:
        InvalidRequest: The file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read {option} {str(path)!r}: {error.strerror}.", param=option) from error


def _request(
    order: GenerateArguments,
    settings: Settings,
    start: StartPicture | None,
    adapted: _Adapted,
    plan: SizePlan | None,
) -> types.GenerationRequest:
    """Build the engine's request; a quality leaves out what it sets.

    Args:
        order: The arguments of the command.
        settings: Settings with the defaults of the model.
        start: Start image and mask.
        adapted: ControlNets and references with their images.
        plan: Size to generate and to deliver. None: a draft at the native size that is only validated.
    """
    images = adapted.control_images
    width, height = (None, None) if plan is None else plan.start_px
    init, mask = (None, None) if start is None else (start.picture, start.mask)
    if plan is not None and width is not None and height is not None:
        init, mask = (None, None) if start is None else start.fitted(width, height)
        images = fit_controls(adapted.controlnets, images, plan.recorded_px, (width, height))
    parse_size(order.size)
    defaults = settings.model.diffusion
    solver: dict[str, Any] = {"sampler": order.sampler}
    if is_learned(order.sampler):
        solver["num_steps"] = order.num_steps
    elif order.quality is None:
        solver = {name: getattr(defaults, name) for name in DEFAULT_SOLVER}
    return types.GenerationRequest(
        **order.prompt_fields,
        negative_prompt=order.negative,
        width_px=width,
        height_px=height,
        hires_px=None if plan is None else plan.hires_px,
        num_images=order.num_images,
        best_of=order.best_of,
        init_image=init,
        mask_image=mask,
        control_images=images,
        reference_images=fit_references(adapted.reference_images),
        diffusion=types.DiffusionParams(
            **{**solver, **order.further},
            controlnets=adapted.controlnets,
            references=adapted.references,
            guidance_scale=defaults.guidance_scale,
            strength=defaults.strength if order.strength is None else order.strength,
        ),
    )


def resolve_prompt(order: GenerateArguments, settings: Settings) -> tuple[dict[str, Any], list[str]]:
    """Return the prompts and the seed of the request, and warnings about its template.

    Raises:
        InvalidRequest: The template cannot be used.
    """
    seed = None if order.seed == ANY_SEED else order.seed
    if order.template == "off":
        return {"prompt": order.prompt, "seed": seed}, []
    mode, count = cast(TemplateMode, order.template), order.best_of or order.num_images
    convert, wildcards = partial(in_a1111, syntax=order.prompt_syntax), Wildcards(settings.model.wildcard_dir)
    return template_fields(order.prompt, mode, seed, max(1, count), wildcards, convert)


def _with_defaults(request: types.GenerationRequest, settings: Settings) -> types.GenerationRequest:
    """Fill what neither the options nor a quality set, so that the defaults of a few-step LoRA do not apply."""
    if is_learned(request.diffusion.sampler):
        return request
    unset = [name for name in DEFAULT_SOLVER if getattr(request.diffusion, name) is None]
    defaults = {name: getattr(settings.model.diffusion, name) for name in unset}
    return msgspec.structs.replace(request, diffusion=msgspec.structs.replace(request.diffusion, **defaults))


def progress_bar(console: Console) -> Progress:
    """Return a progress bar that counts steps and is hidden unless ``console`` is a terminal."""
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
    """Run the request, show its progress, and write each finished image.

    Returns:
        A line to print for each written image, and the number of images that failed.
    """
    started = time.perf_counter()
    steps_done: dict[int, int] = {}
    bar = progress.add_task("generating", total=None, speed="")
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
            case types.ImageFinished(result=result):
                try:
                    lines.append(_write(result, *planned, output))
                except (
                    ModerationBlocked,
                    EngineUnavailable,
                ) as error:  # refused by the safety filter, or no answer
                    num_failed += 1
                    notes.append(f"image {result.image_index} is withheld: {error.message}")
            case types.ImageFailed(image_index=index, message=message):
                num_failed += 1
                notes.append(f"image {index} failed: {message}")
            case types.Failed(message=message, param=param):
                if param is not None:  # a user error that the engine detected
                    raise InvalidRequest(message, param=param)
                notes.append(f"no image was generated: {message}")
                num_failed = request.num_images
            case _:
                pass
    note(progress.console, *notes)
    return lines, num_failed


def _write(result: types.ImageResult, plan: SizePlan, start: StartPicture | None, output: _Output) -> str:
    """Write one image with its parameters as metadata, and return the line to print.

    Raises:
        ModerationBlocked: The safety filter refused the image.
        EngineUnavailable: The safety filter does not answer.
    """
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
        infotext=write_infotext(result, width_px=plan.recorded_px[0], height_px=plan.recorded_px[1]),
    )
    write_output(file, data)
    timings = result.timings
    line = describe_image(file, result, result.num_steps)
    return f"{line}, {1000 * timings.step_s:.1f} ms per step, {timings.denoise_s + timings.decode_s:.2f} s in total"


def describe_image(file: Path, image: AnyImage, num_steps: int) -> str:
    """Return one line with the path of an image, its seeds and how it was generated."""
    sampler = f"{image.sampler} {image.sigma_schedule}" if image.sigma_schedule else image.sampler
    count = "1 step" if num_steps == 1 else f"{num_steps} steps"
    details = "" if image.strength is None else f" at strength {image.strength:g}"
    if image.similarity is not None:
        details += f", first {image.skipped_steps} skipped (prompt similarity {image.similarity:g})"
    if image.refiner:
        details += f", refiner {image.refiner} from {image.switch_at:g}"
    if image.score is not None:
        details += f", score {image.score:.4g}"
    return f"{file}  {seeds_text(image.seed, image.variation_seed)}  {count} of {sampler}{details}"


def note(console: Console, *messages: str) -> None:
    """Print each of ``messages`` as a note."""
    for message in messages:
        console.print(f"note: {message}", style="yellow", markup=False, soft_wrap=True)
