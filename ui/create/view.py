"""Updates of the Create tab for a visitor's requests and images; only changes are sent."""

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
"""Longest time between updates; sending one reveals that a page is closed."""

PARTS: Final = CreateOutputs._fields
OF_PICTURE: Final = frozenset(
    {"picture", "batch", "painted_from", "parameters", "reuse_seed", "vary", "copy_parameters", "download", "edit"}
)
"""Components that describe the image on display."""

OF_RUNNING: Final = frozenset({"generate", "stop"})
"""Components that are always sent, because gradio drops updates of a component that is not built yet."""

Update = Any  # a value of a component, or what gr.update gives


class Screen:
    """The state of one page, to send only changed components."""

    def __init__(self) -> None:
        self._sent: dict[str, Update] = {}

    def draw(self, **values: Update) -> list[Update]:
        """Return updates of all ``CreateOutputs`` in order; components that are not named do not change.

        A new image is sent with all components that describe it, because the visitor may have selected another one
        meanwhile.
        """
        new = {name for name, value in values.items() if name not in self._sent or self._sent[name] != value}
        new |= values.keys() & OF_RUNNING
        if "picture" in new:
            new |= values.keys() & OF_PICTURE
        self._sent |= values
        return [values[name] if name in new else gr.skip() for name in PARTS]


def shown(picture: FinishedPicture) -> dict[str, Update]:
    """Return the values that show a finished ``picture`` and enable its buttons."""
    return {
        **shown_unfinished(picture.path, is_finished=True),
        "painted_from": captions.painted_from(picture),
        "parameters": picture.infotext,
        "download": gr.update(value=str(picture.path), interactive=True),
    }


def shown_unfinished(preview: Path | None, *, is_finished: bool = False) -> dict[str, Update]:
    """Return the values that show a ``preview`` or no image, with its buttons disabled."""
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
    """Return the values that show all ``pictures`` of one request together; a single one is shown alone."""
    if len(pictures) == 1:
        return shown(pictures[0])
    visitor.batch = list(pictures)
    together = gr.update(value=[(str(picture.path), picture.label) for picture in pictures], visible=True)
    words = {captions.painted_from(picture) for picture in pictures}
    prompt_note = words.pop() if len(words) == 1 else ""
    return shown_unfinished(pictures[-1].path) | {"batch": together, "painted_from": prompt_note}


async def resume(visitor: Visitor) -> AsyncIterator[list[Update]]:
    """Yield updates that restore a reloaded page and follow its open requests."""
    screen, going = Screen(), list(visitor.paintings)
    shown_before = {"gallery": _gallery(visitor), **_latest(visitor)} if visitor.pictures else {}
    if visitor.trouble is not None and not going:
        shown_before["caption"] = captions.status(visitor.trouble, is_error=True)
    yield screen.draw(**shown_before)  # a generator that yields nothing would empty everything
    for painting in going:
        async for update in follow(visitor, painting, screen):
            yield update


async def follow(visitor: Visitor, painting: Painting, screen: Screen) -> AsyncIterator[list[Update]]:
    """Yield updates for ``painting``, at most four times a second, until it ends."""
    with visitor.watching():
        while not painting.is_over:
            last_news, began_s = visitor.news, asyncio.get_running_loop().time()
            yield screen.draw(**_going_on(visitor, painting))
            await visitor.wait_for_news(last_news, LOOK_EVERY_S)
            rest_s = UPDATE_EVERY_S - (asyncio.get_running_loop().time() - began_s)
            if rest_s > 0 and not painting.is_over:
                await asyncio.sleep(rest_s)
    yield screen.draw(**_over(visitor, painting))


def _going_on(visitor: Visitor, painting: Painting) -> dict[str, Update]:
    """Return the values for a running request; only the oldest of several is shown."""
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
    """Return the values for an ended request: its images, or else the newest image of the gallery."""
    visitor.trouble = painting.error or visitor.trouble
    shows_older = not painting.pictures and bool(visitor.pictures)
    parts = {
        "caption": captions.caption_of(painting, trouble=visitor.trouble, shows_older=shows_older),
        "gallery": _gallery(visitor),
        **_buttons(visitor.is_busy),
    }
    if painting.pictures:
        parts |= shown_together(visitor, painting.pictures)
    elif painting.preview is not None:
        parts |= shown(visitor.pictures[0]) if visitor.pictures else shown_unfinished(None)
    return parts


def _latest(visitor: Visitor) -> dict[str, Update]:
    """Return the values that show the images of the last request, or the newest image."""
    together, newest = visitor.latest, visitor.pictures[0]
    if len(together) > 1:
        caption = captions.status(captions.batch_facts(together), notes=together[-1].warnings)
        return shown_together(visitor, together) | {"caption": caption}
    return shown(newest) | {"caption": captions.picture_caption(newest)}


def _buttons(is_busy: bool) -> dict[str, Update]:
    return {"generate": shown_if(not is_busy), "stop": shown_if(is_busy)}


def _gallery(visitor: Visitor) -> Update:
    pictures = [(str(picture.path), picture.label) for picture in visitor.pictures]
    return gr.update(value=pictures, visible=bool(pictures))
