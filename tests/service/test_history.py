"""Image history: search, regeneration and permanent deletion, separately for each key."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from PIL import Image

from diffserve.store import Database, Keys
from diffserve.store.database import PageSelection
from diffserve.store.history import EntryFilter, History, new_entry_id
from tests.service.server import RunningServer, error_of, files_of, running_server

ALL = EntryFilter()


def test_entries_are_found_by_words_time_and_model(tmp_path: Path) -> None:
    now_s = 1e9
    history = History(Database(tmp_path), clock=lambda: now_s)
    for words in ("a RED fox", "a red Hase, 100%", "ein grüner FUCHS"):
        history.add(new_entry_id(), "key-1", f"{words}.png", words, "sd15", {"prompt": words})
        now_s += 10
    history.add(new_entry_id(), "key-2", "other.png", "a red fox", "sd15", {})

    def search(*words: str, **filters: float | str) -> list[str]:
        page = history.page("key-1", PageSelection(9), EntryFilter(words, **filters))  # type: ignore[arg-type]
        assert page is not None
        return [entry.recipe["prompt"] for entry in page[0]]

    assert search() == ["ein grüner FUCHS", "a red Hase, 100%", "a RED fox"]
    assert search("Red") == ["a red Hase, 100%", "a RED fox"]
    assert search("fox", "red") == ["a RED fox"]
    assert search("GRÜNER") == ["ein grüner FUCHS"]
    assert (search("%"), search("_")) == (["a red Hase, 100%"], [])
    assert search("red", until_s=1e9 + 10) == ["a RED fox"]
    assert search(since_s=1e9 + 20) == ["ein grüner FUCHS"]
    assert search(model="other") == []
    [entry] = history.page("key-1", PageSelection(9), EntryFilter(("fuchs",)))[0]  # type: ignore[index]
    assert history.set_favorite("key-2", entry.id, is_favorite=True) is None, "of another key"
    assert search(favorite=True) == []
    assert history.set_favorite("key-1", entry.id, is_favorite=True).favorite == 1  # type: ignore[union-attr]
    assert search(favorite=True) == ["ein grüner FUCHS"]
    assert search(favorite=False) == ["a red Hase, 100%", "a RED fox"]
    assert history.set_favorite("key-1", entry.id, is_favorite=False).favorite == 0  # type: ignore[union-attr]
    first = history.page("key-1", PageSelection(2), ALL)
    assert first is not None
    second = history.page("key-1", PageSelection(2, after=first[0][-1].id), ALL)
    assert second is not None
    assert ([entry.file for entry in second[0]], first[1], second[1]) == (["a RED fox.png"], True, False)
    assert history.get("key-2", first[0][0].id) is None
    assert history.page("key-2", PageSelection(2, after=first[0][0].id), ALL) is None
    history.forget(["a RED fox.png"], for_good=True)
    assert all(b"RED fox" not in file.read_bytes() for file in tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["euler", "euler_a", "dpmpp_2m"])
def test_an_image_is_stored_regenerated_and_deleted(server: RunningServer, sampler: str) -> None:
    server.client.delete("/v1/history")
    fields = {"sampler": sampler, "guidance_scale": 3.0, "size": "72x64", "negative_prompt": "blurred"}
    fields |= {"variation_strength": 0.3} if sampler == "euler" else {}  # with a random seed, which is reported
    answer = server.paint("a red fox & <b>", num_steps=3, seed=7, response_format="url", **fields)
    [file], [entry] = files_of(answer), answer.json()["data"]
    assert server.paint("a blue whale").status_code == 200
    page = server.client.get("/v1/history", params={"q": "FOX red"}).json()
    [found_entry] = page["data"]
    assert (found_entry["id"], found_entry["seed"], page["has_more"]) == (entry["history_id"], 7, False)
    detail = server.client.get(f"/v1/history/{found_entry['id']}").json()
    assert detail == found_entry
    content = server.client.get(found_entry["content"])
    assert (content.content, content.headers["content-type"]) == (file, "image/png")
    small = server.client.get(found_entry["thumbnail"])
    with Image.open(io.BytesIO(small.content)) as thumbnail:
        assert (small.headers["content-type"], thumbnail.format, thumbnail.size) == ("image/webp", "WEBP", (72, 64))
    assert detail["restore"]["needs"] == []
    again = server.client.post(detail["restore"]["url"], json=detail["restore"]["body"])
    assert files_of(again) == [file], again.json()["warnings"]
    [url_before] = [httpx.get(entry["url"]).status_code]
    assert server.client.delete(f"/v1/history/{found_entry['id']}").json()["deleted"]
    assert (url_before, httpx.get(entry["url"]).status_code) == (200, 404), "wherever it was kept"
    for path in ("", "/content", "/thumbnail"):
        assert server.status(f"/v1/history/{found_entry['id']}{path}") == 404
    assert server.client.delete("/v1/history").json()["num_deleted"] == 2
    assert server.client.get("/v1/history").json()["data"] == []
    for query, param in (("limit=0", "limit"), ("q=" + "a" * 501, "q"), ("since=x", "since"), ("after=x", "after")):
        assert error_of(server.client.get(f"/v1/history?{query}"))["param"] == param


@pytest.mark.slow
def test_edits_a1111_and_streams_are_recorded(server: RunningServer) -> None:
    server.client.delete("/v1/history")
    [file] = files_of(server.paint(size="64x64"))
    start = base64.b64encode(file).decode()
    edit = {"prompt": "snow", "image": start, "num_inference_steps": 3, "strength": 0.5, "seed": 4}
    [edited] = files_of(server.client.post("/v1/images/edits", json=edit))
    spoken = {"prompt": "a hill", "steps": 2, "width": 64, "height": 64, "seed": 5}
    by_a1111 = server.client.post("/sdapi/v1/txt2img", json=spoken).json()["images"]
    streamed = server.paint("a streamed hill", stream=True)
    assert b"history_id" in streamed.content
    listed = server.client.get("/v1/history", params={"order": "asc"}).json()["data"]
    assert [entry["prompt"] for entry in listed] == ["a red fox", "snow", "a hill", "a streamed hill"]
    assert server.client.get(listed[2]["content"]).content == base64.b64decode(by_a1111[0])
    restore = listed[1]["restore"]
    assert (restore["url"], restore["needs"]) == ("/v1/images/edits", ["image"])
    assert files_of(server.client.post(restore["url"], json=restore["body"] | {"image": start})) == [edited]


@pytest.mark.slow
def test_history_is_separate_per_key_survives_restarts_and_can_be_disabled(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    keys = Keys(Database(tmp_path / "data"))
    own_headers, other = ({"Authorization": f"Bearer {keys.add(name)[0]}"} for name in ("own", "other"))
    body = {"prompt": "a secret", "num_inference_steps": 1, "size": "64x64"}
    with running_server(tiny_model("sd15"), tmp_path) as server:
        server.wait_until_ready()
        answer = httpx.post(f"{server.url}/v1/images/generations", json=body, headers=own_headers, timeout=60)
        name = answer.json()["data"][0]["history_id"]
        for path in (name, f"{name}/content", f"{name}/thumbnail"):
            assert httpx.get(f"{server.url}/v1/history/{path}", headers=other).status_code == 404
        assert httpx.delete(f"{server.url}/v1/history/{name}", headers=other).status_code == 404
        assert httpx.delete(f"{server.url}/v1/history", headers=other).json()["num_deleted"] == 0
        assert "a secret" not in server.errors.read_text()
        server.process.kill()
        server.process.wait()
    with running_server(tiny_model("sd15"), tmp_path) as server:
        [entry] = httpx.get(f"{server.url}/v1/history", headers=own_headers).json()["data"]
        assert httpx.get(f"{server.url}{entry['content']}", headers=own_headers).content == files_of(answer)[0]
    with running_server(tiny_model("sd15"), tmp_path, config="[serve]\nhistory_days = 0.0\n") as server:
        server.wait_until_ready()
        answer = httpx.post(f"{server.url}/v1/images/generations", json=body, headers=own_headers, timeout=60)
        assert "history_id" not in answer.json()["data"][0]
        assert httpx.get(f"{server.url}/v1/history", headers=own_headers).json()["data"] == [], (
            "nor is what was kept before"
        )
        assert list((tmp_path / "data" / "history").iterdir()) == []
