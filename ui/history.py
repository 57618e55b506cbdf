"""The History tab: search the stored images of the visitor's key, load their settings, edit or delete them."""

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
from diffserve.media.infotext import parse_infotext, seeds_text
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
NOTHING: Final = "No images yet; the images you generate appear here."
NOT_FOUND: Final = "No image has all these words in its prompt."
ASK: Final = "Delete permanently?"
DELETE: Final = "Delete"

Update = Any  # a value of a component, or what gr.update gives


class HistoryTab(NamedTuple):
    """Components of the tab."""

    query: gr.Textbox
    search: gr.Button
    note: gr.HTML
    grid: gr.Gallery
    show_more: gr.Button
    actions: gr.Column
    restore: gr.Button
    edit: gr.Button
    delete: gr.Button

    @property
    def outputs(self) -> list[Any]:
        """The components that ``Looking.draw`` updates."""
        return [self.note, self.grid, self.show_more, self.actions, self.delete]


class Looking:
    """Search results of one visitor: thumbnails, the newest first, and the selected one."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.found: list[tuple[HistoryEntry, Path]] = []
        self.last: str | None = None
        self.selected: int | None = None
        self.is_asking = False

    def keep_choice(self, before: Looking) -> None:
        """Keep the selection of an earlier search with the same words, if its image is still among the results."""
        if before.selected is None or before.words != self.words:
            return
        selected_id = before.found[before.selected][0].id
        places = [place for place, (entry, _) in enumerate(self.found) if entry.id == selected_id]
        self.selected = places[0] if places else None
        self.is_asking = before.is_asking and bool(places)

    def draw(self, trouble: str | None = None) -> list[Update]:
        """Return updates of ``HistoryTab.outputs``."""
        pictures = [(str(path), seeds_text(entry.seed, entry.variation_seed)) for entry, path in self.found]
        return [
            captions.status(trouble, is_error=True) if trouble else self._caption(),
            gr.update(value=pictures, visible=bool(pictures), selected_index=self.selected),
            gr.update(visible=self.last is not None),
            gr.update(visible=self.selected is not None),
            gr.update(value=ASK if self.is_asking else DELETE),
        ]

    def _caption(self) -> str:
        if self.selected is not None:
            entry = self.found[self.selected][0]
            at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(entry.created_at))
            seeds = seeds_text(entry.seed, entry.variation_seed)
            facts = f"{entry.model}, {entry.width}x{entry.height}, {seeds}, {at}"
            return captions.status(entry.prompt or "No prompt.", notes=(facts,))
        if not self.found:
            return captions.status(NOT_FOUND if self.words else NOTHING)
        return captions.status("Select an image to use its settings.")


class HistoryHandlers:
    """Events of the tab, shared by all visitors."""

    def __init__(self, server: Server, visitors: Visitors) -> None:
        self._server = server
        self._visitors = visitors
        self._looking: WeakKeyDictionary[Visitor, Looking] = WeakKeyDictionary()

    def connect(self, tab: HistoryTab, opened: gr.Tab, create: CreateTab) -> None:
        """Bind all events; ``create`` is the tab that images are loaded into. Call it inside the page's context."""
        search_events: list[Any] = [opened.select, tab.search.click, tab.query.submit]
        gr.on(search_events, self.search, tab.query, tab.outputs, **PRIVATE)
        tab.show_more.click(self.show_more, None, tab.outputs, **PRIVATE)
        tab.grid.select(self.choose, None, tab.outputs, **PRIVATE)
        tab.delete.click(self.delete, None, tab.outputs, **PRIVATE)
        form = [*create.fields.all, create.advanced, create.showing.caption, *create.start.outputs, tab.note]
        edited = [*create.start.outputs, create.fields.strength, create.showing.caption]
        edited += [create.fields.prompt, create.fields.negative_prompt]
        to_create = "() => diffserve.openTab('Create')"
        tab.restore.click(self.restore, None, form, **PRIVATE).success(js=to_create, **SILENT)
        tab.edit.click(self.edit, None, edited, **PRIVATE).success(js=to_create, **SILENT)

    async def search(self, words: str | None, request: gr.Request) -> list[Update]:
        """Show the newest images with all ``words`` in their prompts; the selection is kept."""
        looking = Looking((words or "").strip())
        trouble = await self._read_on(looking, request)
        looking.keep_choice(self._of(request))
        self._looking[self._visitors.of(request.session_hash)] = looking
        return looking.draw(trouble)

    async def show_more(self, request: gr.Request) -> list[Update]:
        """Show the next page of older images."""
        looking = self._of(request)
        return looking.draw(await self._read_on(looking, request))

    async def choose(self, selection: gr.SelectData, request: gr.Request) -> list[Update]:
        """Select an image."""
        looking = self._of(request)
        is_there = isinstance(selection.index, int) and 0 <= selection.index < len(looking.found)
        looking.selected, looking.is_asking = selection.index if is_there else None, False
        return looking.draw()

    async def delete(self, request: gr.Request) -> list[Update]:
        """Delete the selected image; the first press asks for confirmation."""
        looking = self._of(request)
        if looking.selected is None or not looking.is_asking:
            looking.is_asking = looking.selected is not None
            return looking.draw()
        ask_for_visitor(request)
        try:
            await self._server.client.forget(looking.found[looking.selected][0].id)
        except DiffserveError as error:
            return looking.draw(sentence(error))
        del looking.found[looking.selected]
        looking.selected, looking.is_asking = None, False
        return looking.draw()

    async def restore(self, request: gr.Request) -> list[Update]:
        """Load the settings of the selected image into the form."""
        looking = self._of(request)
        nothing = [gr.skip()] * (len(FORM_FIELDS) + 6)
        if looking.selected is None:
            return [*nothing, gr.skip()]
        try:
            models = await self._server.models()
            data = await self._server.client.history_picture(looking.found[looking.selected][0].id)
            form, notes = await asyncio.to_thread(settings_in, data, models)
        except DiffserveError as error:
            return [*nothing, captions.status(sentence(error), is_error=True)]
        visitor = self._visitors.of(request.session_hash)
        visitor.begin_as(form)
        if "mask" in looking.found[looking.selected][0].restore.needs:
            notes = (*notes, "Its mask is not stored; draw it again.")
        caption = captions.status("Settings loaded from the image; press Generate.", notes=notes)
        return [*form.values, gr.update(open=True), caption, *still_shown(visitor.start), gr.skip()]

    async def edit(self, request: gr.Request) -> list[Update]:
        """Edit the selected image, with its prompts."""
        looking = self._of(request)
        unchanged = [gr.skip()] * 4
        try:
            path = None if looking.selected is None else await self._full_image(looking.found[looking.selected][0])
        except (DiffserveError, OSError) as error:
            return [*shown_start(None, sentence(error)), *unchanged]
        if path is None:
            return [*shown_start(None, "That image no longer exists; search again."), *unchanged]
        self._visitors.of(request.session_hash).start = path
        caption = captions.status("Describe the change and press Generate.")
        return [*shown_start(path), "", caption, *await asyncio.to_thread(_words_of, path)]

    def _of(self, request: gr.Request) -> Looking:
        return self._looking.setdefault(self._visitors.of(request.session_hash), Looking(""))

    async def _read_on(self, looking: Looking, request: gr.Request) -> str | None:
        """Add the next page of results to ``looking``; return an error message if that fails."""
        ask_for_visitor(request)
        try:
            check_text(looking.words, "search", MAX_FIELD_CHARS)
            filters: dict[str, Any] = {"q": looking.words} if looking.words else {}
            filters |= {"after": looking.last} if looking.last is not None else {}
            page = await self._server.client.history(limit=PAGE, **filters)
            files = await asyncio.gather(*map(self._small, page.data))
        except (DiffserveError, OSError) as error:
            return sentence(error)
        looking.found += [(entry, path) for entry, path in zip(page.data, files, strict=True) if path is not None]
        looking.last = page.data[-1].id if page.has_more and page.data else None
        return None

    async def _small(self, entry: HistoryEntry) -> Path | None:
        """Download the thumbnail of ``entry``; return None if the server no longer has it."""
        data = await _unless_gone(self._server.client.history_thumbnail(entry.id))
        return None if data is None else await self._written(entry, data)

    async def _full_image(self, entry: HistoryEntry) -> Path | None:
        """Download the image of ``entry``; return None if the server no longer has it."""
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
    """Return updates with the prompt and negative prompt of the image at ``path``; none if it has no parameters."""
    try:
        parameters = parse_infotext(infotext_of(path.read_bytes()))
    except (OSError, InvalidRequest):
        return gr.skip(), gr.skip()
    return parameters.prompt, parameters.negative_prompt


def lay_out() -> HistoryTab:
    """Build the tab in the current context."""
    with gr.Column(elem_id="history"):
        with gr.Row(elem_id="history-search"):
            query = gr.Textbox(
                "", label="Search", placeholder="Words of the prompt", max_lines=1, elem_id="history-words"
            )
            search = gr.Button("Search", elem_id="history-go")
        note = gr.HTML(elem_id="history-said")
        with gr.Column(visible=False, elem_id="history-one") as actions, gr.Row(elem_id="history-actions"):
            restore = gr.Button("Use these settings", size="sm", elem_id="history-restore")
            edit = gr.Button("Edit image", size="sm", elem_id="history-edit")
            delete = gr.Button(DELETE, size="sm", variant="stop", elem_id="history-delete")
        grid = thumbnails("Images stored by the server", "history-grid")
        show_more = gr.Button("Show older images", size="sm", visible=False, elem_id="history-more")
    return HistoryTab(query, search, note, grid, show_more, actions, restore, edit, delete)
