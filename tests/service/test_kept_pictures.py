"""Images at a URL: they expire after an hour, have unguessable names and fill a bounded folder."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from starlette.requests import Request

from diffserve.api.errors import ConfigError, InvalidRequest
from diffserve.service.http.bodies import parse
from diffserve.service.http.errors import HttpError
from diffserve.service.images.image_store import ImageStore, base_url_of, new_name
from diffserve.service.images.plan import plan_images
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.models import is_alias
from diffserve.settings.layers import Flag, load_settings
from tests.service.server import GENERATIONS, RunningServer, error_of, files_of
from tests.service.test_painting import INFO

NAME = re.compile(r"[0-9a-f]{32}\.png")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> ImageStore:
    return ImageStore(tmp_path / "a" / "pictures", max_bytes=1000, now=clock)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def is_there(store: ImageStore, name: str) -> bool:
    try:
        store.open(name).file.close()
    except HttpError as error:
        return (error.status, error.code) != (404, "picture_not_found")
    return True


def test_an_image_is_stored_for_exactly_an_hour(store: ImageStore, clock: Clock, tmp_path: Path) -> None:
    name = store.store(b"fox", new_name("png"))
    assert NAME.fullmatch(name)
    clock.now_s += 3599
    picture = store.open(name)
    assert (picture.file.read(), picture.num_bytes, picture.left_s) == (b"fox", 3, 1.0)
    picture.file.close()
    clock.now_s += 1
    assert not is_there(store, name)
    store.sweep()
    assert names(tmp_path / "a" / "pictures") == set()


def test_folder_and_files_are_private_to_the_user(store: ImageStore, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "pictures"
    folder.mkdir(parents=True, mode=0o755)
    name = store.store(b"fox", new_name("png"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600


def test_the_oldest_images_are_evicted_and_foreign_files_stay(store: ImageStore, clock: Clock, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "pictures"
    folder.mkdir(parents=True)
    (folder / "somebodys.png").write_bytes(b"x" * 5000)
    kept_names = []
    for _ in range(30):
        kept_names.append(store.store(b"x" * 99, new_name("webp")))
        clock.now_s += 1
        stored = names(folder) - {"somebodys.png"}
        assert sum((folder / name).stat().st_size for name in stored) <= 1000
    assert names(folder) - {"somebodys.png"} == set(kept_names[-len(stored) :])
    assert len(stored) >= 8
    with pytest.raises(OSError, match="too large"):
        store.store(b"x" * 1001, new_name("png"))


def test_a_restart_keeps_fresh_files_and_removes_old_or_partial_ones(
    store: ImageStore, clock: Clock, tmp_path: Path
) -> None:
    folder = tmp_path / "a" / "pictures"
    old = store.store(b"old", new_name("png"))
    (folder / f"{old}.part").write_bytes(b"half")
    clock.now_s += 1800
    fresh = store.store(b"fresh", new_name("jpeg"))
    clock.now_s += 1801
    os.utime(folder / f"{old}.part", (0, 0))
    after = ImageStore(folder, max_bytes=1000, now=clock)
    after.sweep()
    assert names(folder) == {fresh}
    assert is_there(after, fresh)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../secret.png", "a" * 32, f"{'a' * 32}.png", f"{'A' * 32}.png", f"{'a' * 32}.png.part", "\0"],
)
def test_other_names_are_not_found(store: ImageStore, tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "secret.png").write_bytes(b"secret")
    store.store(b"fox", new_name("png"))
    assert not is_there(store, name)


def test_a_folder_that_is_a_symlink_is_not_used(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        ImageStore(tmp_path / "link", max_bytes=1000, now=clock).store(b"fox", new_name("png"))


def test_many_threads_respect_the_size_limit(store: ImageStore, tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=lambda: [store.store(b"x" * 90, new_name("png")) for _ in range(20)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = list((tmp_path / "a" / "pictures").iterdir())
    assert sum(file.stat().st_size for file in files) <= 1000
    assert all(NAME.fullmatch(file.name) for file in files)


@pytest.mark.parametrize(
    ("host", "public_url", "base"),
    [
        ("paint.test:8000", "", "http://paint.test:8000"),
        ("[::1]:8000", "", "http://[::1]:8000"),
        ("paint.test", "https://paint.example/x/", "https://paint.example/x"),
        ("evil/path", "", "http://10.0.0.7:8000"),
        ("user@evil", "", "http://10.0.0.7:8000"),
        ("a b", "", "http://10.0.0.7:8000"),
        (None, "", "http://10.0.0.7:8000"),
    ],
)
def test_urls_use_the_server_address_of_the_request(host: str | None, public_url: str, base: str) -> None:
    headers = [] if host is None else [(b"host", host.encode())]
    scope: dict[str, Any] = {"type": "http", "scheme": "http", "server": ("10.0.0.7", 8000), "headers": headers}
    assert base_url_of(Request(scope), public_url) == base


@pytest.mark.parametrize("value", ["paint.example", "javascript:alert(1)", "https://a b", "https://x/?q", "https://"])
def test_an_invalid_public_url_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="public_url"):
        load_settings(env={"DIFFSERVE_SERVE_PUBLIC_URL": value})
    with pytest.raises(ConfigError, match="url_pictures_bytes"):
        load_settings(env={}, flags={"serve.url_pictures_bytes": Flag("x", -1)})


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *((f"gpt-image-{name}", True) for name in ("1", "1-mini", "1.5", "2", "9.9-x")),
        *((name, True) for name in ("chatgpt-image-latest", "dall-e-2", "dall-e-3")),
        *((name, False) for name in ("gpt-image-", "gpt-image", "dall-e-4", "gpt-4o", "GPT-IMAGE-1", "gpt-image-1/x")),
        ("gpt-image-1\n", False),
        (f"gpt-image-{'1' * 65}", False),
    ],
)
def test_only_gpt_image_models_are_aliases(name: str, is_one: bool) -> None:
    assert is_alias(name) is is_one


@pytest.mark.slow
@pytest.mark.parametrize("image_format", ["png", "jpeg", "webp"])
def test_a_url_returns_the_exact_file(server: RunningServer, image_format: str) -> None:
    answer = server.paint(response_format="url", output_format=image_format, n=2)
    files, entries = files_of(answer), answer.json()["data"]
    urls = [entry["url"] for entry in entries]
    assert len(set(urls)) == 2
    for url, file in zip(urls, files, strict=True):
        assert url.startswith(f"{server.url}/v1/images/files/")
        fetched = httpx.get(url, trust_env=False, headers={"Range": "bytes=0-1,3-4"})
        assert (fetched.status_code, fetched.content) == (200, file)
        assert fetched.headers["content-type"] == f"image/{image_format}"
        assert fetched.headers["x-content-type-options"] == "nosniff"
        assert fetched.headers["content-disposition"].startswith("inline; ")
        assert "sandbox" in fetched.headers["content-security-policy"]
        head = httpx.head(url, trust_env=False)
        assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(file)), b"")
    assert answer.json()["warnings"] == server.paint(output_format=image_format, n=2).json()["warnings"]
    assert "url" not in server.paint().json()["data"][0]


@pytest.mark.slow
def test_older_models_return_urls_by_default(client: OpenAI) -> None:
    quick = {"steps": 1}
    for model in ("dall-e-2", "dall-e-3"):
        data = client.images.generate(model=model, prompt="a fox", extra_body=quick).data
        assert data
        assert data[0].url
        assert data[0].b64_json
    answer = client.images.generate(model="dall-e-3", prompt="a fox", response_format="b64_json", extra_body=quick)
    assert answer.data
    assert (answer.data[0].url, bool(answer.data[0].b64_json)) == (None, True)


@pytest.mark.slow
def test_a_stream_has_the_url_with_the_image(server: RunningServer) -> None:
    answer = server.paint(response_format="url", stream=True)
    [url] = re.findall(r'"url":"([^"]+)"', answer.text)
    assert httpx.get(url, trust_env=False).status_code == 200


@pytest.mark.slow
def test_a_url_uses_the_host_of_the_request(server: RunningServer) -> None:
    body = {"prompt": "a fox", "steps": 1, "response_format": "url"}
    answer = server.client.post(GENERATIONS, json=body, headers={"Host": f"localhost:{server.port}"})
    assert answer.json()["data"][0]["url"].startswith(f"http://localhost:{server.port}/v1/images/files/")


@pytest.mark.slow
def test_an_image_that_cannot_be_stored_is_delivered_with_a_warning(server: RunningServer) -> None:
    folder = server.output.parent / "data" / "pictures"
    moved = folder.rename(folder.with_name("moved")) if folder.exists() else None
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("no folder")
    try:
        answer = server.paint(response_format="url")
        [entry] = answer.json()["data"]
        assert (entry["url"], len(files_of(answer))) == (None, 1)
        assert any("could not be stored" in warning for warning in answer.json()["warnings"])
        assert "could not be stored" in server.paint(response_format="url", stream=True).text
    finally:
        folder.unlink()
        if moved is not None:
            moved.rename(folder)


@pytest.mark.slow
def test_an_expired_image_is_a_404_with_a_message(server: RunningServer) -> None:
    url = server.paint(response_format="url").json()["data"][0]["url"]
    for path in (server.output.parent / "data" / "pictures").iterdir():
        path.unlink()
    gone = httpx.get(url, trust_env=False)
    assert gone.status_code == 404
    assert "60 minutes" in error_of(gone)["message"]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/images/generations", "/v1/images/generations/", "/images/generations/"])
def test_a_base_url_may_lack_its_v1_and_a_path_may_end_in_a_slash(server: RunningServer, path: str) -> None:
    body = {"prompt": "a fox", "steps": 1, "seed": 3, "model": "gpt-image-7-nano"}
    assert files_of(server.client.post(path, json=body)) == files_of(server.client.post(GENERATIONS, json=body))


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", ["/chat/completions", "/completions", "/prompts/rewrite", "/images/generations/x/cancel"]
)
def test_every_post_route_has_these_paths(server: RunningServer, path: str) -> None:
    answers = [server.client.post(name, json={}) for name in (f"/v1{path}", path, f"/v1{path}/", f"{path}/")]
    assert len({(answer.status_code, answer.text) for answer in answers}) == 1
    assert error_of(answers[0])["code"] != "unknown_url"


@pytest.mark.slow
def test_models_are_listed_at_these_paths_too(server: RunningServer) -> None:
    lists = [server.client.get(path).json() for path in ("/v1/models", "/models", "/v1/models/", "/models/")]
    assert all(names_listed == lists[0] for names_listed in lists)
    assert server.client.get("/v1/models/gpt-image-9").json()["id"] == "gpt-image-9"
    assert server.client.get("/models/dall-e-3/").json()["id"] == "dall-e-3"
    assert server.client.get("/models/gpt-5").status_code == 404


def test_without_image_storage_urls_are_refused_and_older_models_return_files() -> None:
    config = load_settings(env={"DIFFSERVE_SERVE_URL_PICTURES_BYTES": "0"}).serve
    with pytest.raises(InvalidRequest, match="b64_json"):
        plan_images(parse(GenerateBody, b'{"prompt": "a", "response_format": "url"}'), INFO, config, "img-1")
    assert not plan_images(parse(GenerateBody, b'{"prompt": "a", "model": "dall-e-3"}'), INFO, config, "img-1").urls


def test_sweeping_continues_after_an_unreadable_folder(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ImageStore(tmp_path / "pictures", max_bytes=1000, now=clock)
    name = store.store(b"fox", new_name("png"))
    monkeypatch.setattr("diffserve.service.images.image_store.SWEEP_EVERY_S", 0.01)
    hidden = (tmp_path / "pictures").rename(tmp_path / "hidden")
    (tmp_path / "pictures").symlink_to(hidden)

    async def run() -> None:
        sweeping = asyncio.create_task(store.sweep_for_ever())
        await asyncio.sleep(0.1)
        (tmp_path / "pictures").unlink()
        hidden.rename(tmp_path / "pictures")
        clock.now_s += 3601
        async with asyncio.timeout(30):
            while (tmp_path / "pictures" / name).exists():
                await asyncio.sleep(0.01)
        sweeping.cancel()

    asyncio.run(run())
