"""The History tab: search the stored images of the visitor's key, and use, compare, download or delete several."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import gradio as gr

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.client import HistoryEntry, HistoryFields
from diffserve.media.images import format_of
from diffserve.media.infotext import parse_infotext
from ui import captions
from ui.create.handlers import settings_in
from ui.create.layout import CreateTab
from ui.create.parameters import FORM_FIELDS, infotext_of
from ui.create.start import shown as shown_start
from ui.create.start import still_shown
from ui.events import LATEST, PRIVATE, SILENT, on_selection
from ui.fields import MAX_FIELD_CHARS, check_text, seeds_named
from ui.history_view import PERIODS, HistoryTab, Looking, Update, zip_of
from ui.server import Server, sentence
from ui.visitors import Visitor, Visitors, ask_for_visitor

T = TypeVar("T")

PAGE: Final = 24
GONE: Final = "That image no longer exists; search again."

_FORM_LENGTH: Final = len(FORM_FIELDS) + 6
_EDIT_LENGTH: Final = 8
"""Number of components of Create that ``restore`` and ``edit`` update."""


class HistoryHandlers:
    """Events of the tab, shared by all visitors."""

    def __init__(self, server: Server, visitors: Visitors) -> None:
        self._server = server
        self._visitors = visitors
        self._looking: WeakKeyDictionary[Visitor, Looking] = WeakKeyDictionary()

    def connect(self, tab: HistoryTab, opened: gr.Tab, create: CreateTab) -> None:
        """Bind all events; ``create`` is the tab that images are loaded into. Call it inside the page's context."""
        search_events: list[Any] = [opened.select, tab.search.click, tab.query.submit]
        search_events += [tab.favorites.change, tab.period.change]
        gr.on(search_events, self.search, [tab.query, tab.favorites, tab.period], tab.outputs, **LATEST)
        tab.show_more.click(self.show_more, None, tab.outputs, **PRIVATE)
        ids = "[...diffserve.chosen.history]"
        on_selection(tab.grid.select, self.choose, "history", ids, tab.selected_outputs)
        tab.favorite.click(self.favorite, None, tab.outputs, **PRIVATE)
        tab.delete.click(self.delete, None, tab.outputs, **PRIVATE)
        tab.compare.click(self.compare, None, [tab.slider, tab.note], **PRIVATE)
        packed = tab.download.click(self.download, None, [tab.file, tab.note], **PRIVATE)
        packed.success(js="(file) => diffserve.save(file)", inputs=tab.file, **SILENT)
        tab.full_screen.click(js="() => diffserve.fullScreen('history-grid')", **SILENT)
        begin = create.settings.start
        form = [*create.fields.all, create.showing.caption, *begin.outputs, create.settings.references.listing]
        edited = [*begin.outputs, create.fields.strength, create.showing.caption]
        edited += [create.fields.prompt, create.fields.negative_prompt]
        to_create = "(isLoaded) => isLoaded ? diffserve.openTab('Create') : []"
        for button, load, loaded in ((tab.restore, self.restore, form), (tab.edit, self.edit, edited)):
            event = button.click(load, None, [*loaded, tab.note, tab.opens_create], **PRIVATE)
            event.success(js=to_create, inputs=tab.opens_create, **SILENT)

    async def search(
        self, words: str | None, favorites: bool | None, period: str | None, request: gr.Request
    ) -> list[Update]:
        """Show the newest images with all ``words`` in their prompts; the selection is kept."""
        seconds = dict(PERIODS).get(period or "", 0)
        filters: HistoryFields = {"since": time.time() - seconds} if seconds else {}
        if favorites:
            filters["favorite"] = True
        looking = Looking((words or "").strip(), filters)
        trouble = await self._read_on(looking, request)
        looking.keep_choice(self._of(request))
        self._looking[self._visitors.of(request.session_hash)] = looking
        return looking.draw(trouble)

    async def show_more(self, request: gr.Request) -> list[Update]:
        """Show the next page of older images."""
        looking = self._of(request)
        return looking.draw(await self._read_on(looking, request))

    async def choose(self, ids: Any, request: gr.Request) -> list[Update]:
        """Select the images whose boxes are checked in the browser."""
        looking = self._of(request)
        looking.choose(ids)
        return looking.draw_selected()

    async def favorite(self, request: gr.Request) -> list[Update]:
        """Mark the selected images as favorites, or unmark them if all are."""
        looking = self._of(request)
        ask_for_visitor(request)
        becomes, num_gone = not looking.are_favorites, 0
        try:
            for entry, _ in looking.selected:
                client = self._server.client
                change = client.add_favorite if becomes else client.remove_favorite
                changed = await _unless_gone(change(entry.id))
                if changed is None:
                    looking.remove(entry)
                    num_gone += 1
                else:
                    looking.replace(changed)
        except DiffserveError as error:
            return looking.draw(sentence(error))
        return looking.draw(_without(num_gone))

    async def delete(self, request: gr.Request) -> list[Update]:
        """Delete the selected images; the first press asks for confirmation."""
        looking = self._of(request)
        if not looking.selected or not looking.is_asking:
            looking.is_asking = bool(looking.selected)
            return looking.draw()
        ask_for_visitor(request)
        try:
            for entry, _ in looking.selected:
                await self._server.client.forget(entry.id)
                looking.remove(entry)
        except DiffserveError as error:
            return looking.draw(sentence(error))
        looking.is_asking = False
        return looking.draw()

    async def compare(self, request: gr.Request) -> list[Update]:
        """Show the two selected images below a slider."""
        entries = [entry for entry, _ in self._of(request).selected]
        ask_for_visitor(request)
        try:
            files = await asyncio.gather(*map(self._full_image, entries[:2]))
        except (DiffserveError, OSError) as error:
            return [gr.update(visible=False), captions.status(sentence(error), is_error=True)]
        if len(files) < 2 or None in files:
            return [gr.update(visible=False), captions.status(GONE, is_error=True)]
        return [gr.update(value=tuple(map(str, files)), visible=True), gr.skip()]

    async def download(self, request: gr.Request) -> list[Update]:
        """Return the selected image, or several in a ZIP file."""
        entries = [entry for entry, _ in self._of(request).selected]
        ask_for_visitor(request)
        try:
            images = await asyncio.gather(*map(self._full_image, entries))
            files = [file for file in images if file is not None]
            if not files:
                raise InvalidRequest(GONE)
            data = None if len(files) == 1 else await asyncio.to_thread(zip_of, files)
            file = files[0] if data is None else await asyncio.to_thread(self._server.files.write, data, "images.zip")
        except (DiffserveError, OSError) as error:
            raise gr.Error(sentence(error), print_exception=False) from None
        trouble = _without(len(entries) - len(files))
        return [gr.update(value=str(file)), captions.status(trouble, is_error=True) if trouble else gr.skip()]

    async def restore(self, request: gr.Request) -> list[Update]:
        """Load the settings of the selected image into the form."""
        looking = self._of(request)
        if not looking.selected:
            return _not_loaded(_FORM_LENGTH)
        entry = looking.selected[0][0]
        try:
            models = await self._server.models()
            data = await _unless_gone(self._server.client.history_picture(entry.id))
            if data is None:
                return _not_loaded(_FORM_LENGTH, GONE)
            form, notes = await asyncio.to_thread(settings_in, data, models)
        except DiffserveError as error:
            return _not_loaded(_FORM_LENGTH, sentence(error))
        visitor = self._visitors.of(request.session_hash)
        visitor.begin_as(form)
        if "mask" in entry.restore.needs:
            notes = (*notes, "Its mask is not stored; draw it again.")
        caption = captions.status(captions.LOADED, notes=notes)
        listing = gr.skip() if form.uses_references else ""
        return [*form.values, caption, *still_shown(visitor.start), listing, gr.skip(), True]

    async def edit(self, request: gr.Request) -> list[Update]:
        """Edit the selected image, with its prompts."""
        looking = self._of(request)
        try:
            path = await self._full_image(looking.selected[0][0]) if looking.selected else None
        except (DiffserveError, OSError) as error:
            return _not_loaded(_EDIT_LENGTH, sentence(error))
        if path is None:
            return _not_loaded(_EDIT_LENGTH, GONE)
        self._visitors.of(request.session_hash).start = path
        caption = captions.status("Describe the change and press Generate.")
        return [*shown_start(path), None, caption, *await asyncio.to_thread(_words_of, path), gr.skip(), True]

    def _of(self, request: gr.Request) -> Looking:
        return self._looking.setdefault(self._visitors.of(request.session_hash), Looking("", {}))

    async def _read_on(self, looking: Looking, request: gr.Request) -> str | None:
        """Add the next page of results to ``looking``; return an error message if that fails."""
        ask_for_visitor(request)
        try:
            check_text(looking.words, "search", MAX_FIELD_CHARS)
            filters: dict[str, Any] = dict(looking.filters)
            filters |= {"q": looking.words} if looking.words else {}
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
        seeds = "" if entry.seed is None else f"-{seeds_named(entry.seed, entry.variation_seed)}"
        name = f"{entry.prompt[:40]}{seeds}-{entry.width}x{entry.height}.{format_of(data)}"
        return await asyncio.to_thread(self._server.files.write, data, name)


async def _unless_gone(answer: Awaitable[T]) -> T | None:
    """Return the ``answer`` of the server about an image, or None if the image no longer exists."""
    try:
        return await answer
    except DiffserveError as error:
        if error.code in ("picture_not_found", "history_not_found"):
            return None
        raise


def _without(num_gone: int) -> str | None:
    """Return a message that ``num_gone`` of the selected images no longer exist; None without such images."""
    return f"{num_gone} of the selected images no longer exist{'s' if num_gone == 1 else ''}." if num_gone else None


def _not_loaded(num_values: int, trouble: str | None = None) -> list[Update]:
    """Return updates that leave ``num_values`` components of Create and the tab, and show ``trouble`` in History."""
    note = captions.status(trouble, is_error=True) if trouble else gr.skip()
    return [*[gr.skip()] * num_values, note, False]


def _words_of(path: Path) -> tuple[Update, Update]:
    """Return updates with the prompt and negative prompt of the image at ``path``; none if it has no parameters."""
    try:
        parameters = parse_infotext(infotext_of(path.read_bytes()))
    except (OSError, InvalidRequest):
        return gr.skip(), gr.skip()
    return parameters.prompt, parameters.negative_prompt
