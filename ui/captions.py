"""What is said under the picture. Texts of others are escaped here, and nowhere else is HTML made of them."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from ui.create.painting import FinishedPicture, Painting

READY = "Say what to paint and press Enter."
WAITING = "waiting for a free place"
"""Also for the moment before the first step, in which there may be one already."""

EARLY = "The server is loading its models; painting begins by itself once they are there."

LOST = "What was being painted was lost with the server; press Generate to paint it again."

STOPPING = "Stopping after this step. Press Stop again to leave the picture."

OLDER = "The picture above is the one before."

SHUT_OUT = "this is asked for again until there is room."
"""Behind what the server says: that its queue is full, or how often the visitor's own key may ask."""


def caption_of(
    painting: Painting, num_waiting: int = 0, trouble: str | None = None, *, is_beside_older: bool = False
) -> str:
    """How far ``painting`` is or how it ended, as HTML; ``num_waiting`` further requests of the same visitor, why
    another one of theirs came to nothing, and whether an older picture stands above, for want of this one.
    """
    others = [trouble] if trouble and trouble != painting.error else []
    notes = (*others, *([OLDER] if is_beside_older else []))
    if painting.is_over:
        return _ending(painting, notes)
    if painting.was_stopped:
        return status(STOPPING, notes=notes, share=painting.share)
    after = f" {num_waiting} more of yours to come." if num_waiting else ""
    return status(f"{progress_text(painting)}{after}", notes=notes, share=painting.share)


def progress_text(painting: Painting) -> str:
    """Return "step 12 of 20, about 3 s left", or the place in the queue; for several images the sum of them, as in
    "1 of 4 finished, 47 % painted, about 8 s left".
    """
    slowest, num_images = painting.slowest, painting.num_images
    if painting.is_early:
        return EARLY
    if painting.shut_out:
        return f"{painting.shut_out}; {SHUT_OUT}"
    if slowest is None and painting.num_finished == 0:
        ahead = painting.queue_position
        return f"place {ahead + 1} in the queue" if ahead else WAITING
    seconds = painting.seconds_left
    left = "" if seconds is None else f", about {seconds_text(seconds)} left"
    if painting.num_painted > 1:
        done = f"{painting.num_finished} of {num_images} finished, " if num_images > 1 else ""
        return f"{done}{math.floor(100 * painting.share)} % painted{left}"
    if slowest is None or slowest.step is None:
        return WAITING
    return f"step {slowest.step} of {slowest.steps}{left}"


def seconds_text(seconds: float) -> str:
    """ "3 s", "2 min 5 s"."""
    whole = max(1, math.ceil(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def picture_caption(picture: FinishedPicture) -> str:
    """How a finished picture was painted, as HTML."""
    return status(picture.facts, notes=picture.warnings)


def status(text: str, *, notes: Iterable[str] = (), is_error: bool = False, share: float | None = None) -> str:
    """A line, with notes below it and a bar of ``share`` (0 to 1), as HTML. Screen readers are told."""
    kind = ' class="error" role="alert"' if is_error else ' role="status"'
    bar = "" if share is None else f'<div class="bar"><i style="width:{100 * share:.0f}%"></i></div>'
    lines = "".join(f"<p class='note'>{html.escape(note)}</p>" for note in dict.fromkeys(notes))
    return f"<div{kind}>{bar}<p>{html.escape(text)}</p>{lines}</div>"


def painted_from(picture: FinishedPicture) -> str:
    """Under a picture whose wish was to be rewritten first: the very words it was painted from, as HTML."""
    if not picture.rewrites:
        return ""
    if picture.prompt == picture.wish:
        return "<p>Painted from your own words.</p>"
    return f"<p>Painted from: <q>{html.escape(picture.prompt)}</q></p>"


def batch_facts(pictures: Sequence[FinishedPicture]) -> str:
    """Of several pictures of one request: what they have in common, and their seeds."""
    seeds = [picture.seed if picture.variation_seed is None else picture.variation_seed for picture in pictures]
    called = "seeds" if pictures[0].variation_seed is None else f"seed {pictures[0].seed}, variation seeds"
    in_a_row = seeds == list(range(seeds[0], seeds[0] + len(seeds)))
    told = f"{seeds[0]} to {seeds[-1]}" if in_a_row and len(seeds) > 2 else ", ".join(map(str, seeds))
    return f"{len(pictures)} pictures, {pictures[-1].settings}, {called} {told}. Choose one to see it alone."


def _ending(painting: Painting, notes: tuple[str, ...]) -> str:
    notes = (*painting.lost, *notes)
    num_done, num_images = len(painting.pictures), painting.num_images
    kept = f" {num_done} of {num_images} pictures are finished." if num_done else ""
    if painting.error is not None:
        return status(f"{painting.error}{kept}", notes=notes, is_error=True)
    if painting.was_stopped:
        slowest = painting.slowest
        unfinished = [picture.stopped for picture in painting.pictures if picture.stopped]
        if unfinished:
            num_finished = num_done - len(unfinished)
            ending = (
                f"{num_finished} of {num_images} pictures are finished." if num_images > 1 else "It is not finished."
            )
            return status(f"Stopped at {unfinished[0]}. {ending}", notes=notes)
        where = f" at step {slowest.step} of {slowest.steps}" if slowest is not None else ""
        return status(f"Stopped{where}.{kept}", notes=notes)
    if not painting.pictures:
        return status("No picture was painted.", notes=notes, is_error=True)
    last = painting.pictures[-1]
    facts = batch_facts(painting.pictures) if num_done > 1 else last.facts
    return status(f"Painted in {painting.seconds:.1f} s: {facts}", notes=(*notes, *last.warnings))
