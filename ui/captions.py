"""Captions below the image as HTML. All text from outside is escaped here."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from diffserve.client import StoredJob
from ui.create.painting import FinishedPicture, Painting

PROMPT_CHARS = 60
"""Beginning of a prompt that the queue shows."""

READY = "Describe a picture and press Enter."
WAITING = "Queued"
"""Also shown before the first step, when the image may already have a slot."""

EARLY = "The server is loading its models; the image is generated as soon as they are ready."

LOST = "This request was lost when the server stopped; press Generate to run it again."

GONE = "This image no longer exists; generate it again."

LOADED = "Settings loaded; press Generate."

ASK = "Delete permanently?"

STOPPING = "Stopping after this step. Press Stop again to discard the unfinished image."

OLDER = "The image below is from an earlier request."

SHUT_OUT = "the request is retried until the queue has room."
"""Follows the server's message about its full queue or the rate limit of the key."""


def caption_of(
    painting: Painting, num_waiting: int = 0, trouble: str | None = None, *, shows_older: bool = False
) -> str:
    """Return the progress or the result of ``painting`` as HTML.

    Args:
        painting: The request.
        num_waiting: How many later requests of this visitor are open.
        trouble: Why another request of this visitor failed, if one did.
        shows_older: Whether the image below is from an earlier request because this one has none.
    """
    other_errors = [trouble] if trouble and trouble != painting.error else []
    notes = (*other_errors, *([OLDER] if shows_older else []))
    if painting.is_over:
        return _ending(painting, notes)
    if painting.was_stopped:
        return status(STOPPING, notes=notes, share=painting.share)
    after = f"; {num_waiting} more queued" if num_waiting else ""
    return status(f"{progress_text(painting)}{after}", notes=notes, share=painting.share)


def progress_text(painting: Painting) -> str:
    """Return the progress of one image, the queue position, or the sum over several images.

    Examples: "step 12 of 20, about 3 s left" and "1 of 4 finished, 47 % done, about 8 s left".
    """
    slowest, num_images = painting.slowest, painting.num_images
    if painting.is_early:
        return EARLY
    if painting.shut_out:
        return f"{painting.shut_out}; {SHUT_OUT}"
    if slowest is None and painting.num_finished == 0:
        ahead = painting.queue_position
        return f"Queued: position {ahead + 1}" if ahead else WAITING
    seconds = painting.seconds_left
    left = "" if seconds is None else f", about {seconds_text(seconds)} left"
    if painting.num_painted > 1:
        done = f"{painting.num_finished} of {num_images} finished, " if num_images > 1 else ""
        return f"{done}{math.floor(100 * painting.share)} % done{left}"
    if slowest is None or slowest.step is None:
        return WAITING
    return f"step {slowest.step} of {slowest.steps}{left}"


def seconds_text(seconds: float) -> str:
    """Format a duration, such as "3 s" or "2 min 5 s"."""
    num_seconds = max(1, math.ceil(seconds))
    if num_seconds < 60:
        return f"{num_seconds} s"
    minutes, remainder = divmod(num_seconds, 60)
    return f"{minutes} min {remainder} s" if remainder else f"{minutes} min"


def queue_list(jobs: Sequence[StoredJob], *, has_more: bool = False) -> str:
    """Return the list of ``jobs`` as HTML, with buttons for each; empty if there are none.

    Args:
        jobs: The jobs in the order of the list.
        has_more: Whether more jobs wait than the list shows.
    """
    if not jobs:
        return ""
    is_open = any(not job.is_over for job in jobs)
    buttons = _queue_button("clear", "Clear the queue") if is_open else ""
    buttons += _queue_button("clear-finished", "Clear finished") if any(job.is_over for job in jobs) else ""
    items = "".join(map(_queue_item, jobs)) + ("<li>More requests wait.</li>" if has_more else "")
    mark = " data-open" if is_open else ""
    return f'<section aria-label="Queue"{mark}><h2>Queue</h2>{buttons}<ul>{items}</ul></section>'


def job_text(job: StoredJob) -> str:
    """Return the state of a job, such as "Queued: position 2, about 8 s left"."""
    left = "" if job.estimated_seconds is None else f", about {seconds_text(job.estimated_seconds)} left"
    match job.status:
        case "queued":
            return f"Queued{left}" if job.position is None else f"Queued: position {job.position}{left}"
        case "running":
            return f"Generating: {math.floor(100 * (job.progress or 0.0))} % done{left}"
        case "succeeded":
            return "Finished"
        case "failed" if job.error is not None and job.error.message:
            return f"Failed: {job.error.message}"
        case status:
            return status.capitalize()


def _queue_item(job: StoredJob) -> str:
    prompt = " ".join((job.prompt or "").split())
    name = prompt if len(prompt) <= PROMPT_CHARS else f"{prompt[:PROMPT_CHARS].rstrip()}..."
    action = "show" if job.status == "succeeded" else "retry" if job.is_over else "cancel"
    button = _queue_button(action, action.capitalize(), name, job.id)
    if job.status == "paused":
        button = _queue_button("resume", "Resume", name, job.id) + button
    return f"<li><span>{html.escape(name)}</span><span>{html.escape(job_text(job))}</span>{button}</li>"


def _queue_button(action: str, label: str, name: str = "", job_id: str = "") -> str:
    """Return a button of the queue; ``name`` tells screen readers what the action is for."""
    described = f' aria-label="{html.escape(f"{label} {name}", quote=True)}"' if name else ""
    return f'<button type="button" data-action="{action}" data-job="{html.escape(job_id)}"{described}>{label}</button>'


def picture_caption(picture: FinishedPicture) -> str:
    """Return the parameters and warnings of a finished image as HTML."""
    return status(picture.facts, notes=picture.warnings)


def status(
    text: str,
    *,
    notes: Iterable[str] = (),
    is_error: bool = False,
    share: float | None = None,
    seconds_left: float | None = None,
) -> str:
    """Return a status line as HTML that screen readers announce.

    Args:
        text: The line.
        notes: Smaller lines below it.
        is_error: Whether to announce it as an alert.
        share: Progress from 0 to 1, shown as a bar.
        seconds_left: Expected duration, which the browser counts down (``screen.js``).
    """
    kind = ' class="error" role="alert"' if is_error else ' role="status"'
    bar = "" if share is None else f'<div class="bar"><i style="width:{100 * share:.0f}%"></i></div>'
    lines = "".join(f"<p class='note'>{html.escape(note)}</p>" for note in dict.fromkeys(notes))
    left = ""
    if seconds_left is not None:
        left = f', <span data-left="{math.ceil(seconds_left)}">{seconds_text(seconds_left)}</span> left'
    return f"<div{kind}>{bar}<p>{html.escape(text)}{left}</p>{lines}</div>"


def painted_from(picture: FinishedPicture) -> str:
    """Return the rewritten prompt of an image as HTML; empty if no rewrite was requested."""
    if not picture.rewrites:
        return ""
    if picture.prompt == picture.wish:
        return "<p>Generated from your original prompt.</p>"
    return f"<p>Prompt used: <q>{html.escape(picture.prompt)}</q></p>"


def batch_facts(pictures: Sequence[FinishedPicture]) -> str:
    """Return the common settings and the seeds of several images of one request."""
    seeds = [picture.seed if picture.variation_seed is None else picture.variation_seed for picture in pictures]
    called = "seeds" if pictures[0].variation_seed is None else f"seed {pictures[0].seed}, variation seeds"
    in_a_row = seeds == list(range(seeds[0], seeds[0] + len(seeds)))
    seed_text = f"{seeds[0]} to {seeds[-1]}" if in_a_row and len(seeds) > 2 else ", ".join(map(str, seeds))
    return (
        f"{len(pictures)} images, {pictures[-1].settings}, {called} {seed_text}. The buttons apply to the selected one."
    )


def _ending(painting: Painting, notes: tuple[str, ...]) -> str:
    notes = (*painting.failures, *notes)
    num_done, num_images = len(painting.pictures), painting.num_images
    finished_text = f" {num_done} of {num_images} images are finished." if num_done else ""
    if painting.error is not None:
        return status(f"{painting.error}{finished_text}", notes=notes, is_error=True)
    if painting.was_stopped:
        slowest = painting.slowest
        unfinished = [picture.stopped for picture in painting.pictures if picture.stopped]
        if unfinished:
            num_finished = num_done - len(unfinished)
            ending = f"{num_finished} of {num_images} images are finished." if num_images > 1 else "It is not finished."
            return status(f"Stopped at {unfinished[0]}. {ending}", notes=notes)
        where = f" at step {slowest.step} of {slowest.steps}" if slowest is not None else ""
        return status(f"Stopped{where}.{finished_text}", notes=notes)
    if not painting.pictures:
        return status("No image was generated.", notes=notes, is_error=True)
    last = painting.pictures[-1]
    facts = batch_facts(painting.pictures) if num_done > 1 else last.facts
    return status(f"Generated in {painting.seconds:.1f} s: {facts}", notes=(*notes, *last.warnings))
