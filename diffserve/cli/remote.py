"""``diffserve generate --server`` and ``rewrite --server``: runs requests on a server.

No torch and no model are loaded. Files, names and metadata are the same as in a local run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import Progress

from diffserve.api.errors import DiffserveError, InvalidRequest, QueueFull
from diffserve.api.rewrite_types import RewriteRequest
from diffserve.cli.generate import (
    ANY_SEED,
    EXIT_FAILED,
    JPEG_QUALITY,
    GenerateArguments,
    check_quality,
    describe_image,
    note,
    progress_bar,
    read_bytes,
    read_pictures,
)
from diffserve.cli.options import SettingsOptions
from diffserve.cli.outputs import STDOUT, plan_outputs, write_output
from diffserve.cli.rewrite import NUM_FURTHER, distinct, shortage_warning
from diffserve.client import Client, CompletedImage, ImageEvent, LostImage, RewriteFields, RewrittenPrompt, Stream
from diffserve.client import Progress as ProgressEvent
from diffserve.client.transport import KEY_VARIABLE
from diffserve.media.images import image_format_of
from diffserve.settings.layers import Flag

VARIABLE: Final = "DIFFSERVE_SERVER"


def run(order: GenerateArguments, server: str, sources: SettingsOptions) -> int:
    """Generate the images of ``order`` on ``server`` and return the exit code: 0, or 1 if an image failed.

    An exception, such as Ctrl-C, cancels the request on the server.

    Raises:
        DiffserveError: The user made an error, or the server is unreachable.
    """
    refuse_placement(sources.loading_flags)
    check_quality(order)
    read_pictures(order)
    files = plan_outputs(order.output, order.prompt, order.num_images, overwrite=order.overwrite)
    fields = fields_of(order, files[0])
    if sources.model is not None:
        fields["model"] = sources.model
    console = Console(stderr=True, highlight=False)
    started_s = time.perf_counter()
    with (
        Client(server) as client,
        progress_bar(console) as progress,
        with_command_line_hints(),
        _stream(client, order, fields) as stream,
    ):
        lines, num_failed = _follow(stream, order, files, progress)
    seconds = time.perf_counter() - started_s
    for line in lines:
        print(f"{line}, {seconds:.2f} s in total", file=sys.stderr if order.output == STDOUT else sys.stdout)
    return EXIT_FAILED if num_failed else 0


@contextmanager
def with_command_line_hints() -> Iterator[None]:
    """Add hints for command line users to the error messages of a server."""
    try:
        yield
    except QueueFull as full:
        full.message = f"{full.message} Try again in {max(1, round(full.retry_after_s))} s."
        raise
    except DiffserveError as error:
        if error.code == "invalid_api_key":
            error.message = f"{error.message} Set {KEY_VARIABLE} to a valid key."
        raise


def refuse_placement(flags: Mapping[str, Flag]) -> None:
    """Raise InvalidRequest if a flag controls how a model is loaded, because the server decides that."""
    for flag in flags.values():
        if flag.value is not None:
            raise InvalidRequest(
                f"{flag.name} is given together with a server (--server or {VARIABLE}), which has already loaded its "
                f"models; leave {flag.name} or the server out.",
                param=flag.name,
            )


def fields_of(order: GenerateArguments, file: Path) -> dict[str, Any]:
    """Return the API request fields of ``order``, without those that use the default of the model.

    Args:
        order: The arguments of the command.
        file: An output file, which determines the image format.
    """
    image_format = "png" if file == STDOUT else image_format_of(file)
    fields = {
        **order.further,
        "loras": order.further.get("loras") or None,
        "controlnets": [
            {**msgspec.structs.asdict(control), "image": read_bytes(Path(image), f"--controlnet {control.name}")}
            for control, image in order.controlnets
        ]
        or None,
        "references": [
            {**msgspec.structs.asdict(reference), "image": read_bytes(Path(image), "--reference")}
            for reference, image in order.references
        ]
        or None,
        "negative_prompt": order.negative or None,
        "size": None if order.size == "auto" else order.size,
        "n": order.num_images,
        "seed": None if order.seed == ANY_SEED else order.seed,
        "quality": order.quality,
        "sampler": order.sampler,
        "num_inference_steps": order.num_steps,
        "guidance_scale": order.guidance_scale,
        "best_of": order.best_of,
        "template": None if order.template == "off" else order.template,
        "prompt_syntax": None if order.template == "off" else order.prompt_syntax,
        "strength": order.strength,
        "output_format": image_format,
        "output_compression": None if image_format == "png" else JPEG_QUALITY,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _stream(client: Client, order: GenerateArguments, fields: dict[str, Any]) -> Stream[ImageEvent]:
    if order.init is None:
        return client.generate_stream(order.prompt, **fields)
    mask = None if order.mask is None else read_bytes(order.mask, "--mask")
    return client.edit_stream(order.prompt, read_bytes(order.init, "--init"), mask, **fields)


def _follow(
    stream: Stream[ImageEvent], order: GenerateArguments, files: list[Path], progress: Progress
) -> tuple[list[str], int]:
    """Show the progress of the request and write each finished image.

    Returns:
        A line to print for each written image, and the number of images that failed.
    """
    started_s = time.perf_counter()
    steps_done: dict[int, int] = {}
    bar = progress.add_task("waiting", total=None, speed="")
    lines: list[str] = []
    notes: dict[str, None] = {}
    num_failed = 0
    for event in stream:
        match event:
            case ProgressEvent(image_index=None):
                ahead = event.queue_position
                progress.update(bar, description=f"position {ahead + 1} in the queue" if ahead else "waiting")
            case ProgressEvent(image_index=int(index), step=int(step), steps=int(steps)):
                steps_done[index] = step
                done = sum(steps_done.values())
                speed = f"{done / (time.perf_counter() - started_s):.1f}/s"
                total = steps * max(order.num_images, order.best_of or 1)
                progress.update(bar, description="generating", completed=done, total=total, speed=speed)
            case CompletedImage():
                file = files[event.image_index]
                write_output(file, event.file)
                lines.append(describe_image(file, event, event.num_inference_steps))
                notes |= dict.fromkeys(event.warnings)
            case LostImage():
                num_failed += 1
                notes[f"image {event.image_index} failed: {event.failure.message}"] = None
            case _:
                pass
    note(progress.console, *notes)
    return lines, num_failed


def rewrite(request: RewriteRequest, style: str | None, server: str, *, is_json: bool) -> int:
    """Rewrite the prompt on ``server``, print the result as a local run does, and return the exit code."""
    fields = RewriteFields(n=request.num_prompts)
    if style is not None:
        fields["style"] = style
    if request.options.seed is not None:
        fields["seed"] = request.options.seed
    with Client(server) as client, with_command_line_hints():
        answer = client.rewrite(request.wish, **fields)

        def draw(seed: int) -> Sequence[RewrittenPrompt]:
            return client.rewrite(request.wish, **(fields | RewriteFields(n=NUM_FURTHER, seed=seed))).prompts[1:]

        prompts = distinct(
            answer.prompts, lambda rewritten: rewritten.revised_prompt or rewritten.prompt, request, draw
        )
    if is_json:
        print(msgspec.json.encode(msgspec.structs.replace(answer, prompts=tuple(prompts))).decode())
        return 0
    for rewritten in prompts:
        print(" ".join((rewritten.revised_prompt or rewritten.prompt).split()))
    warnings = [*(rewritten.warning for rewritten in prompts), shortage_warning(request, len(prompts))]
    note(Console(stderr=True, highlight=False), *dict.fromkeys(filter(None, warnings)))
    return 0
