"""Reference images in the group Adapters: pictures that an IP-Adapter follows, uploaded or taken from the page."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import gradio as gr
import msgspec

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.models.references import MAX_EDGE_PX, MAX_SCALE
from ui.captions import GONE, status
from ui.create.reference_files import ReferenceFile, ReferenceSettings
from ui.create.start import fit_picture, read_upload
from ui.events import PRIVATE, SILENT, on_report
from ui.server import Server, sentence
from ui.uploads import upload_button
from ui.visitors import Visitors, decoded

MISSING: Final = "<p>References: none of the server's IP-Adapters fits this model; start it with --reference-dir.</p>"
REPORT: Final = """element.addEventListener('change', () => trigger('select'));
element.addEventListener('click', (event) => {
    const button = event.target.closest('[data-remove]');
    if (!button) return;
    diffserve.pressed.references.push(button.dataset.remove);
    trigger('click');
});"""
"""Reports changed settings and removed images."""

NUMBERS: Final = (("scale", "Scale", 1, MAX_SCALE), ("start", "From", 0, 1), ("end", "To", 1, 1))
"""Name, label, default and maximum of the number fields of a reference."""

Update = Any  # a value of a component, or what gr.update gives


class ReferencePanel(NamedTuple):
    """Components of the panel; ``missing`` replaces ``panel`` for a model without IP-Adapters."""

    panel: gr.Column
    missing: gr.HTML
    choose: gr.UploadButton
    listing: gr.HTML
    note: gr.HTML


def lay_out() -> ReferencePanel:
    """Build the panel in the current context."""
    missing = gr.HTML(MISSING, elem_id="references-missing", elem_classes="quiet", visible=False, js_on_load=None)
    with gr.Column(visible=False, elem_id="referring") as panel:
        gr.HTML("<p>Reference images: the result follows their content or style.</p>", elem_classes="quiet")
        listing = gr.HTML(label="References", elem_id="references", js_on_load=REPORT)
        choose = upload_button("Add a reference image", "read-reference")
        note = gr.HTML(elem_id="references-note")
    return ReferencePanel(panel, missing, choose, listing, note)


class ReferenceHandlers:
    """Events of the panel, shared by all visitors."""

    def __init__(self, server: Server, visitors: Visitors, panel: ReferencePanel) -> None:
        self._server = server
        self._visitors = visitors
        self._panel = panel

    def connect(self, use: gr.Button, picture: gr.Image, model: gr.Dropdown, groups: gr.Radio) -> None:
        """Bind all events; ``use`` adds the image in ``picture``. Call it inside the page's context."""
        panel = self._panel
        outputs = [panel.listing, panel.note]
        panel.choose.upload(self.upload, [panel.choose, model], outputs, **PRIVATE)
        used = use.click(
            self.use,
            [picture, model],
            [*outputs, groups],
            preprocess=False,
            js="(...values) => values",
            **PRIVATE,
        )
        used.then(js="() => diffserve.look('references')", **SILENT)
        on_report([panel.listing.select], self.change, "diffserve.references()", None)
        on_report([panel.listing.click], self.remove, "diffserve.pressed.references.splice(0)", outputs, [model])
        model.change(self.show, model, panel.listing, **PRIVATE)

    async def show(self, model: str | None, request: gr.Request) -> Update:
        """Return the reference images of this visitor as HTML; nothing changes without any.

        While a page opens, the visitor may not be known yet.
        """
        files = self._visitors.of(request.session_hash).references.files
        return listing(files, await self._adapters(model)) if files else gr.skip()

    async def upload(self, file: str | None, model: str | None, request: gr.Request) -> list[Update]:
        """Add the upload ``file``, which is deleted."""
        try:
            if not file:
                raise InvalidRequest("No image was uploaded; choose one.", param="image")
            data, name = await decoded(request, lambda decoder: read_upload(Path(file), MAX_EDGE_PX, decoder))
            return await self._add(data, name, model, request)
        except (DiffserveError, OSError) as error:
            return [gr.skip(), status(sentence(error), is_error=True)]

    async def use(self, picture: Any, model: str | None, request: gr.Request) -> list[Update]:
        """Add the shown ``picture``, and show the group with the references."""
        shown_picture = self._visitors.of(request.session_hash).picture_at(picture)
        shown = gr.update(value="adapters")
        try:
            if shown_picture is None:
                raise InvalidRequest(GONE, param="image")
            data = await asyncio.to_thread(shown_picture.path.read_bytes)
            data, name = await decoded(request, lambda decoder: fit_picture(data, MAX_EDGE_PX, decoder))
            return [*await self._add(data, name, model, request), shown]
        except (DiffserveError, OSError) as error:
            return [gr.skip(), status(sentence(error), is_error=True), shown]

    async def change(self, settings: Any, request: gr.Request) -> None:
        """Store the settings that were changed in the browser; those of a request are sent again with it."""
        try:
            changed = msgspec.convert(settings, list[ReferenceSettings])
        except msgspec.ValidationError:
            return  # reported by the request
        self._visitors.of(request.session_hash).references.change(changed)

    async def remove(self, ids: Any, model: str | None, request: gr.Request) -> list[Update]:
        """Remove the reference images whose buttons were pressed since the last request."""
        references = self._visitors.of(request.session_hash).references
        for name in ids if isinstance(ids, list) else ():
            references.remove(name)
        return [await self.show(model, request) if references.files else "", ""]

    async def _add(self, data: bytes, name: str, model: str | None, request: gr.Request) -> list[Update]:
        """Add the image file ``data``. Raises DiffserveError or OSError if that is not possible."""
        adapters = await self._adapters(model)
        path = await asyncio.to_thread(self._server.files.write, data, f"reference-{name}")
        self._visitors.of(request.session_hash).references.add(path, adapters[0] if adapters else "")
        return [await self.show(model, request), ""]

    async def _adapters(self, model: str | None) -> Sequence[str]:
        try:
            return (await self._server.models()).image_of(model).references
        except DiffserveError:  # reported by the request
            return ()


def shown(adapters: Sequence[str]) -> list[Update]:
    """Return updates of (panel, missing) and of the button under the image, for a model with ``adapters``."""
    has_adapters = bool(adapters)
    return [gr.update(visible=has_adapters), gr.update(visible=not has_adapters), gr.update(visible=has_adapters)]


def listing(files: Sequence[ReferenceFile], adapters: Sequence[str]) -> str:
    """Return the images with their settings as HTML."""
    return f"<ul>{''.join(_item(number, file, adapters) for number, file in enumerate(files, 1))}</ul>"


def _item(number: int, file: ReferenceFile, adapters: Sequence[str]) -> str:
    settings, source = file.settings, f"gradio_api/file={quote(str(file.path))}"
    options = "".join(
        f"<option{' selected' if name == settings.name else ''}>{escape(name)}</option>" for name in adapters
    )
    fields = f'<label>Adapter<select data-set="name">{options}</select></label>'
    for name, label, default, maximum in NUMBERS:
        value = getattr(settings, name)
        fields += (
            f'<label>{label}<input type="number" data-set="{name}" min="0" max="{maximum:g}" step="0.05" '
            f'value="{default if value is None else value:g}"></label>'
        )
    return (
        f'<li data-reference="{settings.id}"><img src="{escape(source, quote=True)}" alt="Reference {number}">'
        f'<div>{fields}</div><button type="button" data-remove="{settings.id}" aria-label="Remove reference {number}">'
        "Remove</button></li>"
    )
