"""Updates of the Create tab for a visitor's requests and images; only changes are sent."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import gradio as gr

from ui import captions
from ui.create.layout import ACTIONS, CreateOutputs
from ui.create.painting import FinishedPicture, Painting
from ui.events import shown_if
from ui.visitors import Visitor

UPDATE_EVERY_S: Final = 0.25
LOOK_EVERY_S: Final = 1.0
"""Longest time between updates; sending one reveals that a page is closed."""

PARTS: Final = CreateOutputs._fields
OF_PICTURE: Final = frozenset({"picture", "batch", "painted_from", "parameters", "download", "delete", *ACTIONS})
"""Components that describe the image on display."""

OF_RUNNING: Final = frozenset({"generate", "stop"})
"""Components that are always sent, because gradio drops updates of a component that is not built yet."""

NONE_SELECTED: Final = math.nan
"""Index of a gallery without a selection: gradio leaves None out of updates, but sends NaN as null."""

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
        self._sent |= copy.deepcopy(values)  # gradio changes the updates that it gets
        return [values[name] if name in new else gr.skip() for name in PARTS]


def shown(picture: FinishedPicture) -> dict[str, Update]:
    """Return the values that show a finished ``picture`` and enable its buttons."""
    return {
        **shown_unfinished(picture.path, is_finished=True),
        "painted_from": captions.painted_from(picture),
        "parameters": picture.infotext,
        "download": gr.update(value=str(picture.path), interactive=True),
        "favorite": gr.update(
            value="Remove favorite" if picture.is_favorite else "Favorite", interactive=bool(picture.history_id)
        ),
    }


def shown_unfinished(preview: Path | None, *, is_finished: bool = False) -> dict[str, Update]:
    """Return the values that show a ``preview`` or no image, with its buttons disabled."""
    off = gr.update(interactive=is_finished)
    return {
        "picture": None if preview is None else str(preview),
        "batch": gr.update(visible=False),
        "painted_from": "",
        "parameters": "",
        **dict.fromkeys(ACTIONS, off),
        "download": off,
        "delete": gr.update(value="Delete", interactive=is_finished),
    }


def shown_together(visitor: Visitor, pictures: Sequence[FinishedPicture]) -> dict[str, Update]:
    """Return the values that show all ``pictures`` of one request with the first selected; a single one alone."""
    visitor.batch = list(pictures)
    if len(pictures) == 1:
        return shown(pictures[0])
    files = [(str(picture.path), picture.label) for picture in pictures]
    return shown(pictures[0]) | {"batch": gr.update(value=files, visible=True, selected_index=0)}


async def resume(visitor: Visitor) -> AsyncIterator[list[Update]]:
    """Yield updates that restore a reloaded page and follow its open requests."""
    screen, going = Screen(), list(visitor.paintings)
    shown_before = shown_with_facts(visitor, visitor.latest or visitor.pictures[:1]) if visitor.pictures else {}
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
        "caption": captions.caption_of(painting, len(paintings) - 1 + len(visitor.expected), visitor.trouble),
        "gallery": gallery(visitor),
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
        "gallery": gallery(visitor),
        **_buttons(visitor.is_busy),
    }
    if painting.pictures:
        parts |= shown_together(visitor, painting.pictures)
    elif painting.preview is not None:
        parts |= shown(visitor.pictures[0]) if visitor.pictures else shown_unfinished(None)
    return parts


def remaining(visitor: Visitor) -> dict[str, Update]:
    """Return the values after an image was deleted: the rest of its request, or else the newest image."""
    if visitor.batch:
        values = shown_together(visitor, visitor.batch)
        return values | {"gallery": gallery(visitor), "caption": captions.picture_caption(visitor.batch[0])}
    if visitor.pictures:
        return shown_newest(visitor) | {"caption": captions.picture_caption(visitor.pictures[0])}
    return shown_unfinished(None) | {"gallery": gallery(visitor), "caption": captions.status(captions.READY)}


def shown_with_facts(visitor: Visitor, pictures: Sequence[FinishedPicture]) -> dict[str, Update]:
    """Return the values that show ``pictures`` of one request with their parameters, and the gallery."""
    if len(pictures) > 1:
        caption = captions.status(captions.batch_facts(pictures), notes=pictures[-1].warnings)
    else:
        caption = captions.picture_caption(pictures[0])
    return shown_together(visitor, pictures) | {"caption": caption, "gallery": gallery(visitor)}


def shown_newest(visitor: Visitor) -> dict[str, Update]:
    """Return the values that show the newest image alone."""
    return shown(visitor.pictures[0]) | {"gallery": gallery(visitor)}


def _buttons(is_busy: bool) -> dict[str, Update]:
    return {"generate": shown_if(not is_busy), "stop": shown_if(is_busy)}


def gallery(visitor: Visitor) -> Update:
    """Return the update of the gallery; none of its images is marked, because new ones move the others."""
    pictures = [(str(picture.path), picture.label) for picture in visitor.pictures]
    return gr.update(value=pictures, visible=bool(pictures), selected_index=NONE_SELECTED)
