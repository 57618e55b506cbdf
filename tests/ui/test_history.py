"""The History tab: invalid input is refused, and answers of the server are shown."""

from __future__ import annotations

import asyncio
from typing import Any

import gradio as gr

from diffserve.client import HistoryEntry
from tests.ui.gradio_request import Request
from ui.fields import MAX_FIELD_CHARS
from ui.history import ASK, HistoryHandlers, Looking
from ui.server import Server
from ui.visitors import Visitors


def entry(**changes: Any) -> HistoryEntry:
    entry_fields: dict[str, Any] = {
        "id": "h",
        "created_at": 0,
        "model": "m",
        "prompt": "<b>a fox</b>",
        "width": 8,
        "height": 8,
        "seed": 1,
    }
    return HistoryEntry(**entry_fields | {"restore": None} | changes)


def test_unselected_images_are_untouched_and_an_unreachable_server_is_a_message() -> None:
    async def story() -> None:
        server, visitors = Server("http://127.0.0.1:9"), Visitors()
        history, request = HistoryHandlers(server, visitors), Request()
        here: Any = request
        for index in (0, -1, 10**9, "x", None, [0]):
            selection = gr.SelectData(None, {"index": index, "value": None})
            assert (await history.choose(selection, here))[3] == gr.update(visible=False)
        assert (await history.delete(here))[4] == gr.update(value="Delete")
        assert all(value == gr.skip() for value in await history.restore(here))
        assert "no longer exists" in (await history.edit(here))[3]
        assert visitors.of(request.session_hash).start is None
        for words, message in (("fox", "diffserve serve"), ("x" * (MAX_FIELD_CHARS + 1), "at most")):
            assert message in (await history.search(words, here))[0]
        await server.close()

    asyncio.run(story())


def test_a_selection_survives_a_repeated_search(tmp_path: Any) -> None:
    before, same, other = Looking("fox"), Looking("fox"), Looking("owl")
    before.found, before.selected, before.is_asking = [(entry(), tmp_path)], 0, True
    for looking in (same, other):
        looking.found = [(entry(id="newer"), tmp_path), (entry(), tmp_path)]
        looking.keep_choice(before)
    assert (same.selected, same.is_asking, other.selected) == (1, True, None)
    gone = Looking("fox")
    gone.keep_choice(before)
    assert (gone.selected, gone.is_asking) == (None, False)


def test_stored_texts_are_escaped_and_deletion_is_confirmed(tmp_path: Any) -> None:
    looking = Looking("fox")
    assert "No image has all" in looking.draw()[0]
    looking.found, looking.selected, looking.is_asking = [(entry(), tmp_path)], 0, True
    status, *_, delete = looking.draw()
    assert "&lt;b&gt;a fox" in status
    assert "8x8, seed 1, 1970-01-01 00:00 UTC" in status
    assert delete == gr.update(value=ASK)
