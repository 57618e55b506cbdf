"""Tests of ``diffserve mcp`` with the MCP SDK client on standard streams and a live server."""

from __future__ import annotations

import asyncio
import base64
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from diffserve.cli import main
from diffserve.media.images import decode_image
from tests.service.server import ROOT, SOON_S, RunningServer, wait_for
from tests.service.test_bad_input import PIXEL

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("port", [-1, 0, 65536, 99999])
def test_an_impossible_port_is_one_line(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["mcp", "--http", str(port)])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"diffserve: --http must be between 1 and 65535, got {port}.\n"


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(SystemExit) as caught:
            main(["mcp", "--http", str(port)])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error == f"diffserve: cannot listen on 127.0.0.1:{port}: Address already in use; try another --http.\n"


def run_session(url: str, session: Callable[[Any], Awaitable[None]]) -> None:
    """Start the command as an assistant does, and run ``session`` with a connected client."""
    from mcp import Client, StdioServerParameters, stdio_client

    async def run() -> None:
        command = ["-m", "diffserve", "mcp", "--server", url]
        started = StdioServerParameters(command=sys.executable, args=command, env={"PYTHONPATH": str(ROOT)})
        assert sys.__stderr__ is not None
        async with Client(stdio_client(started, sys.__stderr__)) as client:  # the captured one has no file descriptor
            await session(client)

    asyncio.run(run())


def test_an_assistant_lists_the_tools_and_calls_each(text_server: RunningServer, tmp_path: Path) -> None:
    notifications: list[tuple[float, float | None, str | None]] = []

    async def listen(progress: float, total: float | None, message: str | None) -> None:
        notifications.append((progress, total, message))

    async def session(client: Any) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"generate_image", "edit_image", "upscale_image", "rewrite_prompt"}
        assert "ctx" not in tools["generate_image"].input_schema["properties"]
        arguments = {"prompt": "a red fox", "n": 2, "seed": 7, "steps": 3, "size": "64x64"}
        painted = await client.call_tool("generate_image", arguments, progress_callback=listen)
        assert not painted.is_error, painted.content
        files = [base64.b64decode(content.data) for content in painted.content if content.type == "image"]
        assert [content.mime_type for content in painted.content[:2]] == ["image/png"] * 2
        plain = text_server.paint("a red fox", n=2, seed=7, num_steps=3, size="64x64").json()["data"]
        assert files == [base64.b64decode(image["b64_json"]) for image in plain], "same files as from the API"
        recipe = painted.structured_content["recipe"]
        assert (recipe["num_inference_steps"], recipe["size"]) == (3, "64x64")
        first, second = painted.structured_content["images"]
        assert (first["seed"], second["seed"]) == (7, 8)
        varied = await client.call_tool("generate_image", arguments | {"variation_strength": 0.3, "variation_seed": 20})
        assert not varied.is_error, varied.content
        seeds = [(image["seed"], image["variation_seed"]) for image in varied.structured_content["images"]]
        assert seeds == [(7, 20), (7, 21)]
        (tmp_path / "fox.png").write_bytes(files[0])
        encoded = base64.b64encode(files[0]).decode()
        edited = set()
        for image in (
            first["name"],
            str(tmp_path / "fox.png"),
            encoded,
            f"DATA:image/png;base64,{encoded[:76]}\n{encoded[76:]}",
        ):
            arguments = {"prompt": "a blue fox", "image": image, "seed": 1, "steps": 2, "strength": 0.9}
            again = await client.call_tool("edit_image", arguments)
            assert not again.is_error, again.content
            edited.add(again.content[0].data)
        assert len(edited) == 1
        picture = decode_image(base64.b64decode(edited.pop()))
        assert (picture.width_px, picture.height_px) == (64, 64)
        large = await client.call_tool("upscale_image", {"image": first["name"], "upscaler": "embedded-4x"})
        assert not large.is_error, large.content
        assert large.structured_content["size"] == "256x256"
        half = {"image": large.structured_content["name"], "scale": 0.5, "upscaler": "nearest"}
        smaller = await client.call_tool("upscale_image", half)
        assert decode_image(base64.b64decode(smaller.content[0].data)).width_px == 128
        worded = await client.call_tool("rewrite_prompt", {"prompt": "2 doggos"})
        assert worded.structured_content["prompts"] == [worded.content[0].text]

    run_session(text_server.url, session)
    assert [progress for progress, *_ in notifications] == sorted({progress for progress, *_ in notifications})
    assert notifications[-1][:2] == (6.0, 6.0)
    assert "step 3 of 3" in str(notifications[-1][2])


def test_errors_use_the_messages_of_the_server(server: RunningServer) -> None:
    wrong: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("generate_image", {"prompt": ""}, "the prompt is empty"),
        ("generate_image", {"prompt": "a", "size": "9999x9999"}, "size"),
        ("generate_image", {"prompt": "a", "model": "../../x"}, "there is no model"),
        ("edit_image", {"prompt": "a", "image": "/etc/passwd"}, "image"),
        ("edit_image", {"prompt": "a", "image": "no such picture"}, "neither a known image name"),
        ("edit_image", {"prompt": "a", "image": "foxes123"}, "neither a known image name"),
        ("upscale_image", {"image": "no such picture"}, "neither a known image name"),
        ("upscale_image", {"image": PIXEL, "upscaler": "warp"}, "there is no upscaler 'warp'"),
        ("rewrite_prompt", {"prompt": "a"}, "language model"),
    )

    async def session(client: Any) -> None:
        for name, arguments, expected in wrong:
            answer = await client.call_tool(name, arguments)
            assert answer.is_error, name
            assert expected in answer.content[0].text
            assert "root:" not in answer.content[0].text

    run_session(server.url, session)


def test_cancelled_call_ends_on_the_server(server: RunningServer) -> None:
    async def session(client: Any) -> None:
        arguments = {"prompt": "a red fox", "steps": 1000, "n": 2, "sampler": "ddim"}
        painting = asyncio.create_task(client.call_tool("generate_image", arguments))
        await asyncio.to_thread(server.wait_for_requests, 1)
        painting.cancel()
        await asyncio.gather(painting, return_exceptions=True)
        await asyncio.to_thread(wait_for, lambda: server.num_requests() == 0, SOON_S, "the end of it")

    cancelled = server.num_ended("cancelled")
    run_session(server.url, session)
    assert server.num_ended("cancelled") == cancelled + 1


def test_unreachable_server_gives_a_hint_how_to_start_it() -> None:
    async def session(client: Any) -> None:
        answer = await client.call_tool("generate_image", {"prompt": "a"})
        assert answer.is_error
        assert "no server answers at http://127.0.0.1:9; start one with: diffserve serve" in answer.content[0].text

    run_session("http://127.0.0.1:9", session)
