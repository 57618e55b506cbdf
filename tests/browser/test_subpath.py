"""The page below a path of another web server: Debian's nginx in front of a real server."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from diffserve.store import Database, Keys
from tests.browser.visit import PATIENCE_S, Visit
from tests.service.server import START_S, running_server, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
]

NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location /sd/ {{
            proxy_pass http://127.0.0.1:{upstream}/;
            proxy_buffering off;
            {headers}
        }}
        location / {{ return 404; }}
    }}
}}
"""
HOST = "proxy_set_header Host $http_host;"
FORWARDED = "proxy_set_header X-Forwarded-Host $http_host; proxy_set_header X-Forwarded-Prefix /sd;"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running_nginx(folder: Path, port: int, upstream: int, headers: str) -> Iterator[None]:
    """Run nginx at ``port`` with ``upstream`` below ``/sd/``."""
    folder.mkdir()
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, port=port, upstream=upstream, headers=headers))
    process = subprocess.Popen(["nginx", "-c", str(config), "-e", str(folder / "error.log")])
    try:
        wait_for(lambda: _is_listening(port), 30.0, "nginx")
        yield
    finally:
        process.terminate()
        process.wait(30.0)


def _is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("config", "headers"),
    [
        ('[serve]\npublic_url = "http://127.0.0.1:{port}/sd"\n', HOST),
        ('[serve]\ntrusted_proxies = ["127.0.0.1"]\n', FORWARDED),
    ],
    ids=["public-url", "forwarded-prefix"],
)
def test_the_page_works_below_a_path_and_requests_nothing_outside_it(
    browser: Browser, tmp_path: Path, config: str, headers: str
) -> None:
    port = free_port()
    key, _ = Keys(Database(tmp_path / "server" / "data")).add("ann")
    root = f"http://127.0.0.1:{port}/sd"
    with (
        running_server(Path("embedded"), tmp_path / "server", config=config.format(port=port), page=True) as server,
        running_nginx(tmp_path / "nginx", port, server.port, headers),
        httpx.Client(base_url=root, headers={"Authorization": f"Bearer {key}"}, trust_env=False) as client,
    ):
        wait_for(lambda: client.get("/readyz").status_code == 200, START_S, "readiness")
        wait_for(lambda: client.get("/config").status_code == 200, START_S, "the page")
        assert client.get("/config").json()["root"] == root
        context = browser.new_context()
        context.set_default_timeout(PATIENCE_S * 1000)
        expect.set_options(timeout=PATIENCE_S * 1000)
        visit = Visit(context.new_page())
        urls: list[str] = []
        context.on("request", lambda request: urls.append(request.url))
        visit.page.goto(f"http://127.0.0.1:{port}/sd")
        assert visit.page.url == f"{root}/login"
        visit.page.fill("#key", key)
        visit.page.click("button")
        visit.expect_ready()
        assert visit.page.url == f"{root}/"
        assert [cookie["path"] for cookie in context.cookies()] == ["/sd"]

        visit.write("prompt", "a fox on the beach")
        visit.set_advanced(steps=2)
        visit.paint()
        picture = visit.part("picture").locator("img")
        expect(picture).to_have_attribute("src", re.compile(re.escape(f"{root}/gradio_api/file=")))
        visit.until("() => document.querySelector('#picture img').naturalWidth > 0")
        with visit.page.expect_download() as downloading:
            visit.press("download")
        file = Path(downloading.value.path())
        assert file.read_bytes().startswith(b"\x89PNG")
        visit.page.reload()
        visit.expect_ready()
        visit.until("() => document.querySelector('#picture img')?.naturalWidth > 0")
        visit.part("leave").get_by_role("button").click()
        expect(visit.page.locator("#key")).to_be_visible()
        assert visit.page.url == f"{root}/login"
        assert context.cookies() == []

        time.sleep(0.5)
        context.close()
        outside = [url for url in urls if not url.startswith((f"{root}/", "data:", "blob:"))]
        assert outside == [root], "the first address, which nginx completes"
        assert visit.errors == []
        body = {"prompt": "a fox", "num_inference_steps": 1, "response_format": "url"}
        [image] = client.post("/v1/images/generations", json=body, timeout=PATIENCE_S).json()["data"]
        assert image["url"].startswith(f"{root}/v1/images/files/")
        assert client.get(image["url"]).content.startswith(b"\x89PNG")
