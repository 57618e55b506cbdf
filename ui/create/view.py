"""What the tab Create shows of a visitor's paintings and pictures: only what is new is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import gradio as gr

from ui import captions
from ui.create.layout import CreateOutputs
from ui.create.painting import FinishedPicture, Painting
from ui.events import shown_if
from ui.visitors import Visitor

UPDATE_EVERY_S: Final = 0.25
LOOK_EVERY_S: Final = 1.0
"""A page is told at least so often, so that one that is gone is noticed."""

PARTS: Final = CreateOutputs._fields
OF_PICTURE: Final = frozenset(
    {"picture", "batch", "painted_from", "parameters", "reuse_seed", "vary", "copy_parameters", "download", "edit"}
)
"""Those that speak of the picture that is shown, and of no other."""

OF_RUNNING: Final = frozenset({"generate", "stop"})
"""Those that are told anew each time: gradio forgets what a part is told before it stands, as after a reload."""

Update = Any  # a value of a component, or what gr.update gives


class Screen:
    """What one page shows of a painting: only what changed is sent."""

    def __init__(self) -> None:
        self._sent: dict[str, Update] = {}

    def draw(self, **values: Update) -> list[Update]:
        """Updates for all parts of :class:`ui.create.layout.CreateOutputs`, in order; those not named stay as they are.

        A new picture brings along all that speaks of it: somebody may have looked back at another one meanwhile.
        """
        new = {name for name, value in values.items() if name not in self._sent or self._sent[name] != value}
        new |= values.keys() & OF_RUNNING
        if "picture" in new:
            new |= values.keys() & OF_PICTURE
        self._sent |= values
        return [values[name] if name in new else gr.skip() for name in PARTS]


def shown(picture: FinishedPicture) -> dict[str, Update]:
    """A finished ``picture``, and what can be done with it."""
    return {
        **shown_unfinished(picture.path, is_finished=True),
        "painted_from": captions.painted_from(picture),
        "parameters": picture.infotext,
        "download": gr.update(value=str(picture.path), interactive=True),
    }


def shown_unfinished(preview: Path | None, *, is_finished: bool = False) -> dict[str, Update]:
    """A ``preview``, or no picture at all: nothing can be done with it."""
    off = gr.update(interactive=is_finished)
    return {
        "picture": None if preview is None else str(preview),
        "batch": gr.update(visible=False),
        "painted_from": "",
        "parameters": "",
        "reuse_seed": off,
        "vary": off,
        "copy_parameters": off,
        "download": off,
        "edit": off,
    }


def shown_together(visitor: Visitor, pictures: Sequence[FinishedPicture]) -> dict[str, Update]:
    """All ``pictures`` of one request in place of a single one; where there is but one, that."""
    if len(pictures) == 1:
        return shown(pictures[0])
    visitor.batch = list(pictures)
    together = gr.update(value=[(str(picture.path), picture.label) for picture in pictures], visible=True)
    words = {captions.painted_from(picture) for picture in pictures}
    said = words.pop() if len(words) == 1 else ""
    return shown_unfinished(pictures[-1].path) | {"batch": together, "painted_from": said}


async def resume(visitor: Visitor) -> AsyncIterator[list[Update]]:
    """What a page that was reloaded had shown before, and all that is still being painted for it."""
    screen, going = Screen(), list(visitor.paintings)
    shown_before = {"gallery": _gallery(visitor), **_latest(visitor)} if visitor.pictures else {}
    if visitor.trouble is not None and not going:
        shown_before["caption"] = captions.status(visitor.trouble, is_error=True)
    yield screen.draw(**shown_before)  # a generator that yields nothing would empty everything
    for painting in going:
        async for update in follow(visitor, painting, screen):
            yield update


async def follow(visitor: Visitor, painting: Painting, screen: Screen) -> AsyncIterator[list[Update]]:
    """Everything that is to be seen of ``painting``, at most four times a second, and its end."""
    with visitor.watching():
        while not painting.is_over:
            seen, began_s = visitor.news, asyncio.get_running_loop().time()
            yield screen.draw(**_going_on(visitor, painting))
            await visitor.wait_for_news(seen, LOOK_EVERY_S)
            rest_s = UPDATE_EVERY_S - (asyncio.get_running_loop().time() - began_s)
            if rest_s > 0 and not painting.is_over:
                await asyncio.sleep(rest_s)
    yield screen.draw(**_over(visitor, painting))


def _going_on(visitor: Visitor, painting: Painting) -> dict[str, Update]:
    """Of several paintings the oldest is shown."""
    paintings = visitor.paintings
    if not paintings or paintings[0] is not painting:
        return {}
    parts = {
        "caption": captions.caption_of(painting, len(paintings) - 1, visitor.trouble),
        "gallery": _gallery(visitor),
        **_buttons(is_busy=True),
    }
    if painting.preview is not None:
        parts |= shown_unfinished(painting.preview)
    return parts


def _over(visitor: Visitor, painting: Painting) -> dict[str, Update]:
    """Its picture; where there is none, the newest of the gallery in place of its preview."""
    visitor.trouble = painting.error or visitor.trouble
    is_beside_older = not painting.pictures and bool(visitor.pictures)
    parts = {
        "caption": captions.caption_of(painting, trouble=visitor.trouble, is_beside_older=is_beside_older),
        "gallery": _gallery(visitor),
        **_buttons(visitor.is_busy),
    }
    if painting.pictures:
        parts |= shown_together(visitor, painting.pictures)
    elif painting.preview is not None:
        parts |= shown(visitor.pictures[0]) if visitor.pictures else shown_unfinished(None)
    return parts


def _latest(visitor: Visitor) -> dict[str, Update]:
    """The pictures of the last request, or the last picture there is, while nothing newer is to be seen."""
    together, newest = visitor.latest, visitor.pictures[0]
    if len(together) > 1:
        said = captions.status(captions.batch_facts(together), notes=together[-1].warnings)
        return shown_together(visitor, together) | {"caption": said}
    return shown(newest) | {"caption": captions.picture_caption(newest)}


def _buttons(is_busy: bool) -> dict[str, Update]:
    return {"generate": shown_if(not is_busy), "stop": shown_if(is_busy)}


def _gallery(visitor: Visitor) -> Update:
    pictures = [(str(picture.path), picture.label) for picture in visitor.pictures]
    return gr.update(value=pictures, visible=bool(pictures))
