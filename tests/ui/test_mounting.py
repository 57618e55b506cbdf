"""The mounted page: its routes answer, it loads nothing external and leaves no files."""

from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

import ui
from ui.__main__ import main
from ui.files import PageFiles
from ui.mounting import MAX_SESSIONS

ROOT = Path(__file__).resolve().parents[2]


def visit(story: Callable[[httpx.AsyncClient], Awaitable[None]], url: str = "http://127.0.0.1:9") -> tuple[str, ...]:
    """Run ``story(client)`` on the mounted page of an absent server, and return the paths that the page needs."""

    async def run() -> tuple[str, ...]:
        app = FastAPI()
        paths = ui.mount_page(app, url)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                await story(client)
        return paths

    return asyncio.run(run())


@pytest.mark.slow
def test_the_page_loads_before_its_server_and_loads_nothing_external() -> None:
    async def story(client: httpx.AsyncClient) -> None:
        page = await client.get("/")
        assert page.status_code == 200
        assert "diffserve" in page.text
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"([^\"]+)\"", page.text)
        assert loaded
        assert not [address for address in loaded if "//" in address]
        theme = (await client.get("/theme.css")).text
        assert not re.search(r"url\(.?https?:|@import", theme)
        config = (await client.get("/config")).json()
        assert (config["analytics_enabled"], config["show_error"], config["footer_links"]) == (False, False, [])
        endpoint_names = {each["api_name"] for each in config["dependencies"] if each["api_visibility"] == "public"}
        assert endpoint_names == {
            "generate",
            "suggest",
            "read_parameters",
            "read_control",
            "experiment",
            "experiment_estimate",
        }

    paths = visit(story)
    assert paths[0] == "/"
    assert not [path for path in paths if any(word in path for word in ("/login/", "proxy", "vibe", "monitoring"))]


@pytest.mark.slow
def test_scripts_may_omit_every_field_with_a_default() -> None:
    endpoints = ui.create_page("http://127.0.0.1:9").get_api_info()["named_endpoints"]
    expected = {
        name: [each["parameter_name"] for each in endpoint["parameters"] if not each["parameter_has_default"]]
        for name, endpoint in endpoints.items()
    }
    assert expected == {
        "/generate": ["prompt"],
        "/suggest": ["prompt"],
        "/read_parameters": ["file"],
        "/read_control": ["file"],
        "/experiment": [],
        "/experiment_estimate": [],
    }


@pytest.mark.slow
def test_the_only_queue_is_the_engines() -> None:
    page = ui.create_page("http://127.0.0.1:9")
    assert {event.concurrency_limit for event in page.fns.values() if event.queue} <= {None, "default"}
    assert page._queue.default_concurrency_limit is None
    assert page._queue.max_thread_count >= 1000


@pytest.mark.slow
def test_handlers_with_a_visitor_run_in_the_event_loop() -> None:
    """Check for coroutines, because Gradio runs other handlers in threads, where a request cannot be cancelled."""
    handlers = [event.fn for event in ui.create_page("http://127.0.0.1:9").fns.values() if callable(event.fn)]
    with_request = [each for each in handlers if "request" in inspect.signature(each).parameters]
    assert len(with_request) >= 9
    assert [
        each.__qualname__
        for each in with_request
        if not (inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each))
    ] == []


@pytest.mark.slow
def test_gradio_stores_a_bounded_number_of_sessions() -> None:
    app = FastAPI()
    ui.mount_page(app, "http://127.0.0.1:9")
    assert app.routes[-1].app.state_holder.capacity == MAX_SESSIONS  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_image_folder_is_removed_with_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    original_init = PageFiles.__init__

    def noting(self: PageFiles, **settings: int) -> None:
        original_init(self, **settings)
        folders.append(self.folder)

    monkeypatch.setattr(PageFiles, "__init__", noting)

    async def story(client: httpx.AsyncClient) -> None:
        assert [folder.exists() for folder in folders] == [True]

    visit(story)
    assert [folder.exists() for folder in folders] == [False]


def test_importing_the_package_loads_neither_gradio_nor_torch() -> None:
    code = "import sys, ui, ui.__main__; print([name for name in ('gradio', 'torch', 'pandas') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.slow
def test_the_page_loads_no_torch() -> None:
    code = "import sys, ui.page; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]"


def test_an_invalid_address_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--server", "nonsense"]) == 2
    output = capsys.readouterr().err
    assert "'nonsense'" in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("port", ["-1", "0", "65536"])
def test_an_impossible_port_is_one_line(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--port={port}"]) == 2
    assert capsys.readouterr().err == f"ui: --port must be between 1 and 65535, got {port}.\n"
