"""The History tab: invalid input is refused, and answers of the server are shown."""

from __future__ import annotations

import asyncio
import io
import zipfile
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from diffserve.client import HistoryEntry
from tests.ui.gradio_request import Request
from ui.captions import ASK
from ui.fields import MAX_FIELD_CHARS
from ui.history import HistoryHandlers
from ui.history_view import Looking, zip_of
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
        for ids in (["x", None, 3], "x", 3, None):
            assert (await history.choose(ids, here))[1] == gr.update(visible=False)
        assert (await history.delete(here))[-1] == gr.update(value="Delete")
        *unchanged, opens_create = await history.restore(here)
        assert all(value == gr.skip() for value in unchanged)
        assert opens_create is False
        *unchanged, note, opens_create = await history.edit(here)
        assert all(value == gr.skip() for value in unchanged)
        assert "no longer exists" in note
        assert opens_create is False
        assert "no longer exists" in (await history.compare(here))[1]
        with pytest.raises(gr.Error, match="no longer exists"):
            await history.download(here)
        assert visitors.of(request.session_hash).start is None
        for words, message in (("fox", "diffserve serve"), ("x" * (MAX_FIELD_CHARS + 1), "at most")):
            assert message in (await history.search(words, False, "Any time", here))[2]
        await server.close()

    asyncio.run(story())


def test_a_selection_survives_a_search_that_finds_it(tmp_path: Path) -> None:
    before, same, narrower, gone = (Looking(words, {}) for words in ("fox", "fox", "owl", "fox"))
    before.found = [(entry(), tmp_path), (entry(id="other"), tmp_path)]
    before.choose(["h", "other"])
    before.is_asking = True
    same.found = [(entry(id="newer"), tmp_path), *before.found]
    narrower.found = before.found[:1]
    for looking, ids, is_asking in ((same, ["h", "other"], True), (narrower, ["h"], False), (gone, [], False)):
        looking.keep_choice(before)
        assert ([each.id for each, _ in looking.selected], looking.is_asking) == (ids, is_asking)


def test_stored_texts_are_escaped_and_deletion_is_confirmed(tmp_path: Path) -> None:
    looking = Looking("fox", {})
    assert "No image has all" in looking.draw()[2]
    looking.found = [(entry(), tmp_path), (entry(id="two", favorite=True), tmp_path)]
    looking.choose(["h"])
    looking.is_asking = True
    grid, _, status, *_, delete = looking.draw()
    assert "<b>" not in grid + status
    assert "&lt;b&gt;a fox" in status
    assert '8x8, seed 1, <time datetime="1970-01-01T00:00:00Z">1970-01-01 00:00 UTC</time>' in status
    assert delete == gr.update(value=ASK)
    assert (grid.count(" checked"), grid.count("★")) == (1, 1)


def test_buttons_follow_the_number_of_selected_images(tmp_path: Path) -> None:
    looking = Looking("", {})
    looking.found = [(entry(id=name, favorite=name != "c"), tmp_path) for name in "abc"]
    expected = {"": (False, False), "a": (True, False), "ab": (False, True), "abc": (False, False)}
    for ids, (is_single, is_pair) in expected.items():
        looking.choose(list(ids))
        _, actions, _, restore, edit, favorite, compare, _ = looking.draw_selected()
        assert actions["visible"] == bool(ids)
        assert (restore["interactive"], edit["interactive"], compare["interactive"]) == (is_single, is_single, is_pair)
        assert favorite["value"] == ("Favorite" if "c" in ids else "Remove favorite")


def test_several_images_become_one_archive(tmp_path: Path) -> None:
    files = [tmp_path / "one" / "fox.png", tmp_path / "two" / "fox.png"]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.write_bytes(bytes([number]))
    with zipfile.ZipFile(io.BytesIO(zip_of(files))) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    assert contents == {"001-fox.png": b"\0", "002-fox.png": b"\1"}
