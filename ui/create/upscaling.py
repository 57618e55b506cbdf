"""The Upscale button: enlarge the shown image by the server's default upscaler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import gradio as gr
import msgspec

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.media.images import read_infotext
from ui import captions
from ui.create.layout import CreateTab
from ui.create.painting import FinishedPicture
from ui.create.view import Screen, Update, shown_newest
from ui.fields import seeds_named
from ui.server import Server, sentence
from ui.visitors import Visitors, ask_for_visitor

UPSCALING: Final = "Upscaling"


class Upscaling:
    """Event of the button, shared by all visitors."""

    def __init__(self, server: Server, visitors: Visitors, tab: CreateTab) -> None:
        self._server = server
        self._visitors = visitors
        self._tab = tab

    def connect(self) -> None:
        """Bind the event; call it inside the page's context."""
        showing = self._tab.showing
        showing.upscale.click(
            self.upscale,
            showing.picture,
            list(showing),
            preprocess=False,
            js="(shown) => [shown]",
            api_visibility="private",
            show_progress="hidden",
            trigger_mode="multiple",
            concurrency_limit=None,
        )

    async def upscale(self, picture: Any, request: gr.Request) -> AsyncIterator[list[Update]]:
        """Enlarge the shown ``picture`` and show the result, which is also in the history."""
        visitor, screen = self._visitors.of(request.session_hash), Screen()
        original = visitor.picture_at(picture)
        if original is None:
            yield screen.draw(caption=captions.status(captions.GONE, is_error=True))
            return
        ask_for_visitor(request)
        yield screen.draw(caption=captions.status(UPSCALING), upscale=gr.update(interactive=False))
        began_s = time.monotonic()
        try:
            large = await self._upscaled(original)
        except (DiffserveError, OSError) as error:
            trouble = captions.status(sentence(error), is_error=True)
            yield screen.draw(caption=trouble, upscale=gr.update(interactive=True))
            return
        visitor.add(large)
        took = f"Upscaled in {time.monotonic() - began_s:.1f} s: {large.facts}"
        yield screen.draw(**shown_newest(visitor), caption=captions.status(took, notes=large.warnings))

    async def _upscaled(self, original: FinishedPicture) -> FinishedPicture:
        """Return ``original`` enlarged by the default upscaler.

        Raises:
            DiffserveError: The server cannot upscale it.
            OSError: A file cannot be read or written.
        """
        done = await self._server.client.upscale(await asyncio.to_thread(original.path.read_bytes))
        name = f"{original.prompt[:40]}-{seeds_named(original.seed, original.variation_seed)}-{done.size}"
        path = await asyncio.to_thread(self._server.files.write, done.file, f"{name}.{done.output_format}")
        return msgspec.structs.replace(
            original,
            path=path,
            infotext=await asyncio.to_thread(_infotext_of, done.file),
            warnings=done.warnings,
            settings=f"{done.upscaler}, {done.scale:g} times larger, {done.size}",
            origin="",
            history_id=done.files[0].history_id or "",
            is_favorite=False,
        )


def _infotext_of(file: bytes) -> str:
    """Return the parameters in an image file; empty if it has none."""
    try:
        return str(read_infotext(file) or "")
    except InvalidRequest:
        return ""
