"""A reloaded tab finds its requests and images; a closed tab cancels only its own requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from tests.service.server import SOON_S, RunningServer
from tests.ui.test_painting import LONG, order, until_step
from ui.create.painting import FinishedPicture
from ui.create.view import PARTS, Screen, follow, resume
from ui.files import PageFiles
from ui.server import Server
from ui.visitors import MAX_EMPTY, MAX_TOKENS, Galleries, Visitor, Visitors, owner_of_token

TOKEN, OTHER = "0" * 32, "1" * 32
GRACE_S = 0.5
NEVER_S = 10_000.0
PICTURE = FinishedPicture(
    path=Path("a.png"), seed=1, prompt="a fox", wish="a fox", rewrites=False, infotext="", warnings=(), settings=""
)


def tell(url: str, story: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        server = Server(url)
        try:
            await story(server)
        finally:
            await server.close()

    asyncio.run(run())


async def shown_by(moments: AsyncIterator[Sequence[Any]]) -> dict[str, Any]:
    """Return the newest value of each component after all ``moments``."""
    shown: dict[str, Any] = {}
    async with asyncio.timeout(SOON_S):
        async for moment in moments:
            shown |= {name: value for name, value in zip(PARTS, moment, strict=True) if value != gr.skip()}
    return shown


async def hang_up(visitors: Visitors, session: str, watching: AsyncIterator[Any]) -> None:
    """Close the page of ``session``, as Gradio reports it."""
    await watching.aclose()  # type: ignore[attr-defined]
    visitors.leave(session)


def test_buttons_are_sent_with_every_update_and_other_parts_once() -> None:
    screen = Screen()
    parts = {"caption": "a", "generate": {"visible": "hidden"}, "stop": {"visible": True}}
    updates = [
        {name for name, value in zip(PARTS, screen.draw(**parts), strict=True) if value != gr.skip()} for _ in "ab"
    ]
    assert updates == [{"caption", "generate", "stop"}, {"generate", "stop"}]


@pytest.mark.slow
def test_a_reloaded_tab_restores_its_request_and_its_images(server: RunningServer) -> None:
    async def story(page: Server) -> None:
        visitors = Visitors(grace_s=NEVER_S)
        before = visitors.arrive("before", TOKEN)
        await shown_by(follow(before, before.paint(page, order()), Screen()))
        long = before.paint(page, order(num_inference_steps=150))
        watching = follow(before, long, Screen())
        await anext(watching)
        await hang_up(visitors, "before", watching)
        after = visitors.arrive("after", TOKEN)
        assert after is before
        assert not long.is_over
        shown = await shown_by(resume(after))
        assert "150 steps" in shown["caption"]
        assert [Path(path).exists() for path, _ in shown["gallery"]["value"]] == [True, True]
        assert not long.was_stopped

    tell(server.url, story)


@pytest.mark.slow
def test_a_closed_tab_cancels_only_its_own_request(server: RunningServer) -> None:
    async def story(page: Server) -> None:
        visitors = Visitors(grace_s=GRACE_S)
        mine, other_visitor = visitors.arrive("mine", TOKEN), visitors.arrive("theirs", OTHER)
        paintings = [visitor.paint(page, order(num_inference_steps=LONG)) for visitor in (mine, other_visitor)]
        watching = [
            follow(visitor, each, Screen()) for visitor, each in zip((mine, other_visitor), paintings, strict=True)
        ]
        await asyncio.gather(*map(anext, watching), *map(until_step, paintings))
        await hang_up(visitors, "mine", watching[0])
        async with asyncio.timeout(SOON_S):
            await paintings[0].wait()
        assert paintings[0].was_stopped
        assert not paintings[1].is_over
        other_visitor.stop()
        await paintings[1].wait()

    tell(server.url, story)


@pytest.mark.slow
def test_a_disconnected_script_is_cancelled_at_once(server: RunningServer) -> None:
    async def story(page: Server) -> None:
        visitor = Visitors(grace_s=NEVER_S).of("script")
        painting = visitor.paint(page, order(num_inference_steps=LONG))
        watching = follow(visitor, painting, Screen())
        await anext(watching)
        await watching.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(SOON_S):
            await painting.wait()
        assert painting.was_stopped

    tell(server.url, story)


@pytest.mark.parametrize("token", [None, "", "0", "g" * 32, "0" * 33, "../" + "0" * 29])
def test_only_an_unguessable_token_restores_a_visitor(token: str | None) -> None:
    async def story() -> None:
        visitors = Visitors()
        mine = visitors.arrive("mine", TOKEN)
        assert visitors.arrive("again", TOKEN) is mine
        assert visitors.arrive("other", token) is not mine
        assert visitors.arrive("another", token) is not visitors.of("other")

    asyncio.run(story())


def test_a_token_restores_nothing_with_another_key() -> None:
    async def story() -> None:
        visitors = Visitors()
        mine = visitors.arrive("mine", TOKEN, "key-1")
        assert visitors.arrive("again", TOKEN, "key-1") is mine
        assert visitors.arrive("other", TOKEN, "key-2") is not mine

    asyncio.run(story())


def test_visitors_without_content_are_removed_first() -> None:
    async def story() -> None:
        visitors = Visitors(grace_s=GRACE_S)
        visitor = visitors.arrive("one", TOKEN)
        visitor.pictures = [PICTURE]
        empty = visitors.arrive("empty", OTHER)
        for number in range(10 * MAX_TOKENS):
            visitors.of(f"session {number}").trouble = "nothing came of it"
            if number % 8 == 0:
                visitors.arrive(f"page {number}", f"{number:032x}")
        assert len(visitors._visitors) <= 2 * MAX_EMPTY
        assert len(visitors._tokens) <= MAX_TOKENS
        assert visitors.of("one") is visitor
        assert visitors.of("empty") is not empty

    asyncio.run(story())


def test_a_removed_visitor_is_recreated_for_its_tab() -> None:
    async def story() -> None:
        visitors = Visitors(grace_s=GRACE_S)
        visitors.arrive("mine", TOKEN)
        for number in range(2 * MAX_EMPTY):
            visitors.of(f"session {number}")
        mine = visitors.of("mine")
        assert mine.grace_s == GRACE_S
        assert visitors.arrive("again", TOKEN) is mine

    asyncio.run(story())


@pytest.mark.slow
def test_images_of_present_visitors_survive_a_restart(server: RunningServer) -> None:
    files = PageFiles()

    async def story(page: Server) -> None:
        visitors = Visitors(files)
        page.files = files
        visitor = visitors.arrive("before", TOKEN)
        painting = visitor.paint(page, order(n=2))
        await painting.wait()
        assert len(visitor.pictures) == 2

    with contextlib.closing(_Ended(files)):
        tell(server.url, story)
        files._folder_lock.close()  # as if its process had been killed
        again = PageFiles()
        pictures = Visitor(pictures=Galleries(again).take(owner_of_token(TOKEN))).pictures
        assert [picture.seed for picture in pictures] == [4, 3] or [picture.seed for picture in pictures] == [3, 4]
        assert all(picture.path.is_relative_to(again.folder) for picture in pictures)
        assert {picture.facts for picture in pictures} == {
            f"{pictures[0].settings}, seed 3", f"{pictures[0].settings}, seed 4"
        }  # fmt: skip
        assert Galleries(again).take(owner_of_token(OTHER)) == []
        again.stays = frozenset
        again.remove()


class _Ended:
    """Removal of leftover files on close."""

    def __init__(self, files: PageFiles) -> None:
        self._files = files

    def close(self) -> None:
        import shutil

        shutil.rmtree(self._files.folder, ignore_errors=True)
