"""The tab History: what the server keeps of a visitor's key, to be looked for, taken up again, and forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import gradio as gr

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.client import HistoryEntry
from diffserve.media.images import format_of
from diffserve.media.infotext import parse_infotext, seeds_told
from ui import captions
from ui.create.handlers import settings_in
from ui.create.layout import CreateTab, thumbnails
from ui.create.parameters import FORM_FIELDS, infotext_of
from ui.create.start import shown as shown_start
from ui.create.start import still_shown
from ui.events import PRIVATE, SILENT
from ui.fields import MAX_FIELD_CHARS, check_text, seeds_named
from ui.server import Server, sentence
from ui.visitors import Visitor, Visitors, ask_for_visitor

PAGE: Final = 24
NOTHING: Final = "Nothing is kept here yet; what you paint will be."
NOT_FOUND: Final = "No picture of yours has all these words in its prompt."
ASK: Final = "Delete for good?"
DELETE: Final = "Delete"

Update = Any  # a value of a component, or what gr.update gives


class HistoryTab(NamedTuple):
    """Its parts."""

    query: gr.Textbox
    search: gr.Button
    said: gr.HTML
    grid: gr.Gallery
    more: gr.Button
    one: gr.Column
    restore: gr.Button
    edit: gr.Button
    delete: gr.Button

    @property
    def outputs(self) -> list[Any]:
        """What :meth:`Looking.draw` updates."""
        return [self.said, self.grid, self.more, self.one, self.delete]


class Looking:
    """What one visitor looks at: pictures, in small as files, the newest first, and the ``chosen`` one of them."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.found: list[tuple[HistoryEntry, Path]] = []
        self.last: str | None = None
        self.chosen: int | None = None
        self.is_asking = False

    def keep_choice(self, before: Looking) -> None:
        """Choose what was chosen ``before``, where it was looked for by the same words and is found again."""
        if before.chosen is None or before.words != self.words:
            return
        wanted = before.found[before.chosen][0].id
        places = [place for place, (entry, _) in enumerate(self.found) if entry.id == wanted]
        self.chosen = places[0] if places else None
        self.is_asking = before.is_asking and bool(places)

    def draw(self, trouble: str | None = None) -> list[Update]:
        """Updates of :attr:`HistoryTab.outputs`."""
        pictures = [(str(path), seeds_told(entry.seed, entry.variation_seed)) for entry, path in self.found]
        return [
            captions.status(trouble, is_error=True) if trouble else self._said(),
            gr.update(value=pictures, visible=bool(pictures), selected_index=self.chosen),
            gr.update(visible=self.last is not None),
            gr.update(visible=self.chosen is not None),
            gr.update(value=ASK if self.is_asking else DELETE),
        ]

    def _said(self) -> str:
        if self.chosen is not None:
            entry = self.found[self.chosen][0]
            at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(entry.created_at))
            seeds = seeds_told(entry.seed, entry.variation_seed)
            facts = f"{entry.model}, {entry.width}x{entry.height}, {seeds}, {at}"
            return captions.status(entry.prompt or "Painted without words.", notes=(facts,))
        if not self.found:
            return captions.status(NOT_FOUND if self.words else NOTHING)
        return captions.status("Choose a picture to take it up again.")


class HistoryHandlers:
    """The events of the tab, for all visitors."""

    def __init__(self, server: Server, visitors: Visitors) -> None:
        self._server = server
        self._visitors = visitors
        self._looking: WeakKeyDictionary[Visitor, Looking] = WeakKeyDictionary()

    def connect(self, tab: HistoryTab, opened: gr.Tab, create: CreateTab) -> None:
        """Bind everything, within the page's context; a picture is taken up again in the tab ``create``."""
        anew: list[Any] = [opened.select, tab.search.click, tab.query.submit]
        gr.on(anew, self.search, tab.query, tab.outputs, **PRIVATE)
        tab.more.click(self.more, None, tab.outputs, **PRIVATE)
        tab.grid.select(self.choose, None, tab.outputs, **PRIVATE)
        tab.delete.click(self.delete, None, tab.outputs, **PRIVATE)
        form = [*create.fields.all, create.advanced, create.showing.caption, *create.start.outputs, tab.said]
        edited = [*create.start.outputs, create.fields.strength, create.showing.caption]
        edited += [create.fields.prompt, create.fields.negative_prompt]
        to_create = "() => diffserve.openTab('Create')"
        tab.restore.click(self.restore, None, form, **PRIVATE).success(js=to_create, **SILENT)
        tab.edit.click(self.edit, None, edited, **PRIVATE).success(js=to_create, **SILENT)

    async def search(self, words: str | None, request: gr.Request) -> list[Update]:
        """The newest pictures with all ``words`` in their prompts; what is chosen until they are here stays chosen."""
        looking = Looking((words or "").strip())
        trouble = await self._read_on(looking, request)
        looking.keep_choice(self._of(request))
        self._looking[self._visitors.of(request.session_hash)] = looking
        return looking.draw(trouble)

    async def more(self, request: gr.Request) -> list[Update]:
        """Those before."""
        looking = self._of(request)
        return looking.draw(await self._read_on(looking, request))

    async def choose(self, chosen: gr.SelectData, request: gr.Request) -> list[Update]:
        """One of them."""
        looking = self._of(request)
        is_there = isinstance(chosen.index, int) and 0 <= chosen.index < len(looking.found)
        looking.chosen, looking.is_asking = chosen.index if is_there else None, False
        return looking.draw()

    async def delete(self, request: gr.Request) -> list[Update]:
        """Forget the chosen one, on the second press."""
        looking = self._of(request)
        if looking.chosen is None or not looking.is_asking:
            looking.is_asking = looking.chosen is not None
            return looking.draw()
        ask_for_visitor(request)
        try:
            await self._server.client.forget(looking.found[looking.chosen][0].id)
        except DiffserveError as error:
            return looking.draw(sentence(error))
        del looking.found[looking.chosen]
        looking.chosen, looking.is_asking = None, False
        return looking.draw()

    async def restore(self, request: gr.Request) -> list[Update]:
        """How the chosen one was painted, into the fields."""
        looking = self._of(request)
        nothing = [gr.skip()] * (len(FORM_FIELDS) + 6)
        if looking.chosen is None:
            return [*nothing, gr.skip()]
        try:
            models = await self._server.models()
            data = await self._server.client.history_picture(looking.found[looking.chosen][0].id)
            form, notes = await asyncio.to_thread(settings_in, data, models)
        except DiffserveError as error:
            return [*nothing, captions.status(sentence(error), is_error=True)]
        visitor = self._visitors.of(request.session_hash)
        visitor.begin_as(form)
        if "mask" in looking.found[looking.chosen][0].restore.needs:
            notes = (*notes, "What was marked on it is not kept either: mark it again.")
        said = captions.status("These are the settings of that picture; paint it again.", notes=notes)
        return [*form.values, gr.update(open=True), said, *still_shown(visitor.start), gr.skip()]

    async def edit(self, request: gr.Request) -> list[Update]:
        """Begin from the chosen one, and from its words."""
        looking = self._of(request)
        unchanged = [gr.skip()] * 4
        try:
            path = None if looking.chosen is None else await self._whole(looking.found[looking.chosen][0])
        except (DiffserveError, OSError) as error:
            return [*shown_start(None, sentence(error)), *unchanged]
        if path is None:
            return [*shown_start(None, "That picture is no longer here; look for it again."), *unchanged]
        self._visitors.of(request.session_hash).start = path
        said = captions.status("Say what it is to become, and press Generate.")
        return [*shown_start(path), "", said, *await asyncio.to_thread(_words_of, path)]

    def _of(self, request: gr.Request) -> Looking:
        return self._looking.setdefault(self._visitors.of(request.session_hash), Looking(""))

    async def _read_on(self, looking: Looking, request: gr.Request) -> str | None:
        """Find more of what ``looking`` looks for; what went wrong, for a person."""
        ask_for_visitor(request)
        try:
            check_text(looking.words, "search", MAX_FIELD_CHARS)
            wanted: dict[str, Any] = {"q": looking.words} if looking.words else {}
            wanted |= {"after": looking.last} if looking.last is not None else {}
            page = await self._server.client.history(limit=PAGE, **wanted)
            files = await asyncio.gather(*map(self._small, page.data))
        except (DiffserveError, OSError) as error:
            return sentence(error)
        looking.found += [(entry, path) for entry, path in zip(page.data, files, strict=True) if path is not None]
        looking.last = page.data[-1].id if page.has_more and page.data else None
        return None

    async def _small(self, entry: HistoryEntry) -> Path | None:
        """Where its picture lies now, in small; ``None`` where the server has it no more."""
        data = await _unless_gone(self._server.client.history_thumbnail(entry.id))
        return None if data is None else await self._written(entry, data)

    async def _whole(self, entry: HistoryEntry) -> Path | None:
        """The same, as it was painted."""
        data = await _unless_gone(self._server.client.history_picture(entry.id))
        return None if data is None else await self._written(entry, data)

    async def _written(self, entry: HistoryEntry, data: bytes) -> Path:
        name = f"{entry.prompt[:40]}-{seeds_named(entry.seed, entry.variation_seed)}.{format_of(data)}"
        return await asyncio.to_thread(self._server.files.write, data, name)


async def _unless_gone(picture: Awaitable[bytes]) -> bytes | None:
    try:
        return await picture
    except DiffserveError as error:
        if error.code in ("picture_not_found", "history_not_found"):
            return None
        raise


def _words_of(path: Path) -> tuple[Update, Update]:
    """Prompt and negative prompt of the picture at ``path``, as updates; none where it does not say."""
    try:
        said = parse_infotext(infotext_of(path.read_bytes()))
    except (OSError, InvalidRequest):
        return gr.skip(), gr.skip()
    return said.prompt, said.negative_prompt


def lay_out() -> HistoryTab:
    """Build the tab in the current context."""
    with gr.Column(elem_id="history"):
        with gr.Row(elem_id="history-search"):
            query = gr.Textbox(
                "", label="Search", placeholder="Words of the prompt", max_lines=1, elem_id="history-words"
            )
            search = gr.Button("Search", elem_id="history-go")
        said = gr.HTML(elem_id="history-said")
        with gr.Column(visible=False, elem_id="history-one") as one, gr.Row(elem_id="history-actions"):
            restore = gr.Button("Use these settings", size="sm", elem_id="history-restore")
            edit = gr.Button("Edit this picture", size="sm", elem_id="history-edit")
            delete = gr.Button(DELETE, size="sm", variant="stop", elem_id="history-delete")
        grid = thumbnails("Pictures that the server keeps", "history-grid")
        more = gr.Button("Show older ones", size="sm", visible=False, elem_id="history-more")
    return HistoryTab(query, search, said, grid, more, one, restore, edit, delete)
