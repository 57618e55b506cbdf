"""Layout and updates of the History tab. ``history`` has its events."""

from __future__ import annotations

import html
import io
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import gradio as gr

from diffserve.client import HistoryEntry, HistoryFields
from diffserve.media.infotext import seeds_text
from ui import captions

DAY_S: Final = 86_400
PERIODS: Final = (("Any time", 0), ("Last day", DAY_S), ("Last 7 days", 7 * DAY_S), ("Last 30 days", 30 * DAY_S))
"""Label and length in seconds of the periods to search in; 0: unlimited."""

NOTHING: Final = "No images yet; the images you generate appear here. Those of experiments are kept with them."
NOT_FOUND: Final = "No image has all these words in its prompt, or fits the filters."
SELECT: Final = "Select one or more images; Shift selects all between two."
DELETE: Final = "Delete"
REPORT_SELECTION: Final = """const chosen = diffserve.chosen.history = new Set();
let last = null;
const report = (isNew) => {
    diffserve.selecting('history', isNew);
    trigger('select');
};
const items = () => [...element.querySelectorAll('[data-id]')];
const mark = () => items().forEach((item) => {
    item.querySelector('input').checked = chosen.has(item.dataset.id);
    item.classList.toggle('selected', chosen.has(item.dataset.id));
});
element.addEventListener('click', ({ target, shiftKey }) => {
    if (!target.matches('[data-id] input')) return;
    const ids = items().map((item) => item.dataset.id), id = target.closest('[data-id]').dataset.id;
    const at = ids.indexOf(id), from = shiftKey && ids.includes(last) ? ids.indexOf(last) : at;
    for (const each of ids.slice(Math.min(at, from), Math.max(at, from) + 1)) {
        if (target.checked) chosen.add(each); else chosen.delete(each);
    }
    last = id;
    mark();
    report(true);
});
watch('value', () => {
    const drawn = items().filter((item) => item.querySelector('input').defaultChecked).map((item) => item.dataset.id);
    const ids = items().map((item) => item.dataset.id);
    for (const id of [...chosen]) if (!ids.includes(id)) chosen.delete(id);
    mark();
    if (drawn.length !== chosen.size || drawn.some((id) => !chosen.has(id))) report(false);
});"""
"""Keeps the selected images in ``diffserve.chosen.history``; Shift selects or unselects all between two clicks.

A grid that the server has drawn again may lack a selection that is still on its way, which is then reported again.
"""

Update = Any  # a value of a component, or what gr.update gives


class HistoryTab(NamedTuple):
    """Components of the tab."""

    query: gr.Textbox
    search: gr.Button
    favorites: gr.Checkbox
    period: gr.Dropdown
    note: gr.HTML
    grid: gr.HTML
    show_more: gr.Button
    actions: gr.Column
    restore: gr.Button
    edit: gr.Button
    favorite: gr.Button
    compare: gr.Button
    full_screen: gr.Button
    download: gr.Button
    delete: gr.Button
    slider: gr.ImageSlider
    file: gr.File
    opens_create: gr.Checkbox

    @property
    def selected_outputs(self) -> list[Any]:
        """The components that ``Looking.draw_selected`` updates."""
        buttons = [self.restore, self.edit, self.favorite, self.compare, self.delete]
        return [self.note, self.actions, self.slider, *buttons]

    @property
    def outputs(self) -> list[Any]:
        """The components that ``Looking.draw`` updates."""
        return [self.grid, self.show_more, *self.selected_outputs]


class Looking:
    """Search results of one visitor: thumbnails, the newest first, and the selected ones.

    Attributes:
        words: The words of the search.
        filters: The other filters of the search.
        found: The entries with their thumbnails.
        last: ID of the last entry if there are more, else None.
        is_asking: Whether the deletion of the selected ones waits for confirmation.
    """

    def __init__(self, words: str, filters: HistoryFields) -> None:
        self.words = words
        self.filters = filters
        self.found: list[tuple[HistoryEntry, Path]] = []
        self.last: str | None = None
        self.is_asking = False
        self._ids: frozenset[str] = frozenset()

    @property
    def selected(self) -> list[tuple[HistoryEntry, Path]]:
        """The selected entries with their thumbnails."""
        return [(entry, path) for entry, path in self.found if entry.id in self._ids]

    @property
    def are_favorites(self) -> bool:
        """Whether all selected entries are favorites."""
        return all(entry.favorite for entry, _ in self.selected)

    def choose(self, ids: object) -> None:
        """Select the entries whose IDs are in the list ``ids`` of the browser; unknown ones are ignored."""
        self._ids = frozenset(name for name in ids if isinstance(name, str)) if isinstance(ids, list) else frozenset()
        self.is_asking = False

    def keep_choice(self, before: Looking) -> None:
        """Keep the selection of an earlier search, limited to the current results."""
        self._ids = before._ids & {entry.id for entry, _ in self.found}
        self.is_asking = before.is_asking and bool(self._ids) and self._ids == before._ids

    def replace(self, changed: HistoryEntry) -> None:
        """Put ``changed`` in the place of the entry with its ID."""
        self.found = [(changed if entry.id == changed.id else entry, path) for entry, path in self.found]

    def remove(self, removed: HistoryEntry) -> None:
        """Remove an entry."""
        self.found = [(entry, path) for entry, path in self.found if entry.id != removed.id]

    def draw(self, trouble: str | None = None) -> list[Update]:
        """Return updates of ``HistoryTab.outputs``."""
        return [self._grid(), gr.update(visible=self.last is not None), *self.draw_selected(trouble)]

    def draw_selected(self, trouble: str | None = None) -> list[Update]:
        """Return updates of ``HistoryTab.selected_outputs``; the grid keeps its checked boxes and the focus."""
        num_selected = len(self.selected)
        return [
            captions.status(trouble, is_error=True) if trouble else self._caption(),
            gr.update(visible=num_selected > 0),
            gr.update(visible=False),
            gr.update(interactive=num_selected == 1),
            gr.update(interactive=num_selected == 1),
            gr.update(value="Remove favorite" if self.are_favorites else "Favorite"),
            gr.update(interactive=num_selected == 2),
            gr.update(value=captions.ASK if self.is_asking else DELETE),
        ]

    def _caption(self) -> str:
        selected = self.selected
        if len(selected) == 1:
            entry = selected[0][0]
            at = datetime.fromtimestamp(entry.created_at, UTC)
            facts = f"{entry.model}, {entry.width}x{entry.height}{_seeds(entry)}, "
            moment = f'<time datetime="{at:%Y-%m-%dT%H:%M:%SZ}">{at:%Y-%m-%d %H:%M} UTC</time>'
            prompt = html.escape(entry.prompt or "No prompt.")
            return f'<div role="status"><p>{prompt}</p><p class="note">{html.escape(facts)}{moment}</p></div>'
        if selected:
            return captions.status(f"{len(selected)} images are selected.")
        if self.found:
            return captions.status(SELECT)
        return captions.status(NOT_FOUND if self.words or self.filters else NOTHING)

    def _grid(self) -> str:
        return f'<ul class="tiles">{"".join(self._tile(entry, path) for entry, path in self.found)}</ul>'

    def _tile(self, entry: HistoryEntry, path: Path) -> str:
        is_selected = entry.id in self._ids
        name = html.escape(f"{entry.prompt[:80] or 'No prompt'}{_seeds(entry)}", quote=True)
        box = f'<input type="checkbox" aria-label="{name}"{" checked" if is_selected else ""}>'
        star = '<span class="star" role="img" aria-label="Favorite">★</span>' if entry.favorite else ""
        source = html.escape(f"gradio_api/file={quote(str(path))}", quote=True)
        kind = "thumbnail-item selected" if is_selected else "thumbnail-item"
        return (
            f'<li class="{kind}" data-id="{html.escape(entry.id, quote=True)}"><label>{box}'
            f'<img src="{source}" alt="" loading="lazy">{star}</label></li>'
        )


def _seeds(entry: HistoryEntry) -> str:
    """Return the seeds of an image as the end of its description; empty if they are not known."""
    return "" if entry.seed is None else f", {seeds_text(entry.seed, entry.variation_seed)}"


def zip_of(files: Sequence[Path]) -> bytes:
    """Return a ZIP file with ``files``, numbered, because names may be equal; images are stored uncompressed."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for number, file in enumerate(files, 1):
            archive.write(file, f"{number:03}-{file.name}")
    return packed.getvalue()


def lay_out() -> HistoryTab:
    """Build the tab in the current context."""
    with gr.Column(elem_id="history"):
        with gr.Row(elem_id="history-search"):
            query = gr.Textbox(
                "", label="Search", placeholder="Words of the prompt", max_lines=1, elem_id="history-words"
            )
            period = gr.Dropdown(
                [label for label, _ in PERIODS], value=PERIODS[0][0], label="Period", elem_id="history-period"
            )
            favorites = gr.Checkbox(label="Only favorites", elem_id="history-favorites")
            search = gr.Button("Search", elem_id="history-go")
        note = gr.HTML(elem_id="history-said")
        with gr.Column(visible=False, elem_id="history-one") as actions, gr.Row(elem_id="history-actions"):
            buttons = {
                name: gr.Button(label, size="sm", elem_id=f"history-{name.replace('_', '-')}")
                for name, label in ACTIONS.items()
            }
            delete = gr.Button(DELETE, size="sm", variant="stop", elem_id="history-delete")
        slider = gr.ImageSlider(
            label="Comparison",
            show_label=False,
            interactive=False,
            visible=False,
            format="png",
            elem_id="history-slider",
        )
        grid = gr.HTML(label="Images stored by the server", elem_id="history-grid", js_on_load=REPORT_SELECTION)
        show_more = gr.Button("Show older images", size="sm", visible=False, elem_id="history-more")
        file = gr.File(visible="hidden", elem_id="history-file")
        opens_create = gr.Checkbox(visible=False)
    return HistoryTab(
        query=query,
        search=search,
        favorites=favorites,
        period=period,
        note=note,
        grid=grid,
        show_more=show_more,
        actions=actions,
        delete=delete,
        slider=slider,
        file=file,
        opens_create=opens_create,
        **buttons,
    )


ACTIONS: Final = {
    "restore": "Use these settings",
    "edit": "Edit",
    "favorite": "Favorite",
    "compare": "Compare",
    "full_screen": "Full screen",
    "download": "Download",
}
