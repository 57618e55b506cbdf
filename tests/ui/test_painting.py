"""Requests and visitors of the page with a real server: stored files and freed slots."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from diffserve.client import Failure, LostImage, Progress, StreamedImageFields
from diffserve.service.http.keys import RateLimits
from diffserve.store.keys import Key
from tests.service.server import SOON_S, RunningServer, files_of, wait_for
from ui.captions import SHUT_OUT, caption_of, painted_from, progress_text
from ui.create.painting import Painting
from ui.create.parameters import CheckedForm
from ui.server import Server
from ui.visitors import MAX_PICTURES, MAX_VISITORS, Visitor, Visitors

LONG = 1000


def order(prompt: str = "a red fox", *, rewrites: bool = False, **fields: object) -> CheckedForm:
    fields_sent: StreamedImageFields = {"num_inference_steps": 4, "seed": 3, "partial_images": 2, **fields}  # type: ignore[typeddict-item]
    return CheckedForm(prompt=prompt, fields=fields_sent, rewrites=rewrites)


def tell(url: str, story: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        server = Server(url)
        try:
            await story(server)
        finally:
            await server.close()

    asyncio.run(run())


async def until_step(painting: Painting) -> None:
    """Wait until the first step is done."""
    await until(lambda: painting.slowest is not None and bool(painting.slowest.step))


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until ``is_so``."""
    async with asyncio.timeout(SOON_S):
        while not is_so():
            await asyncio.sleep(0.01)


def test_images_that_fail_for_one_reason_report_it_once() -> None:
    full = Failure(code="out_of_memory", message="the device is out of memory.")
    broken = Failure(code="internal", message="something broke.")

    async def fail() -> str:
        server = Server("http://127.0.0.1:9")
        painting = Painting(server, order(n=4), lambda _: None)
        painting.stop()
        await painting.wait()
        for index, failure in ((2, full), (0, full), (1, broken), (3, full)):
            await painting._take(LostImage(id="1", image_index=index, failure=failure))
        await server.close()
        return caption_of(painting)

    message = asyncio.run(fail())
    assert message.count("out of memory") == 1
    assert "Images 1, 3 and 4 failed: the device is out of memory." in message
    assert "Image 2 failed: something broke." in message


@pytest.mark.slow
def test_stored_files_equal_the_servers_files(text_server: RunningServer) -> None:
    plain = files_of(text_server.paint("a red fox", num_steps=4, seed=3, n=2))

    async def story(server: Server) -> None:
        visitor = Visitor()
        painting = visitor.paint(server, order(n=2))
        await painting.wait()
        assert sorted(picture.path.read_bytes() for picture in painting.pictures) == sorted(plain)
        assert {picture.seed for picture in visitor.pictures} == {3, 4}
        assert all(picture.path.suffix == ".png" for picture in visitor.pictures)
        assert painting.preview is not None
        assert "4 steps" in caption_of(painting)
        assert painted_from(painting.pictures[0]) == ""
        assert not visitor.is_busy

    tell(text_server.url, story)


@pytest.mark.slow
def test_a_rewritten_request_shows_the_revised_prompt(text_server: RunningServer) -> None:
    async def story(server: Server) -> None:
        painting = Visitor().paint(server, order("fox", rewrites=True, prompt_rewriter="auto"))
        await painting.wait()
        (picture,) = painting.pictures
        assert picture.wish == "fox"
        assert picture.prompt != "fox"
        assert picture.prompt in painted_from(picture)

    tell(text_server.url, story)


@pytest.mark.slow
def test_stop_frees_only_the_slot_of_its_visitor(text_server: RunningServer) -> None:
    async def story(server: Server) -> None:
        visitors = Visitors()
        mine = visitors.of("mine").paint(server, order(num_inference_steps=LONG))
        other_painting = visitors.of("theirs").paint(server, order(num_inference_steps=LONG))
        await asyncio.gather(until_step(mine), until_step(other_painting))
        assert "step " in progress_text(mine)
        assert visitors.of("mine").stop() == 1
        await mine.wait()
        await asyncio.to_thread(wait_for, lambda: text_server.num_requests() == 1, SOON_S, "the free lane")
        assert "Stopped at step" in caption_of(mine)
        assert not other_painting.is_over
        visitors.leave("theirs")
        await other_painting.wait()
        await asyncio.to_thread(wait_for, lambda: text_server.num_requests() == 0, SOON_S, "the other lane")

    tell(text_server.url, story)


@pytest.mark.slow
def test_a_refusal_is_shown_and_holds_nothing(text_server: RunningServer) -> None:
    async def story(server: Server) -> None:
        visitor = Visitor()
        painting = visitor.paint(server, order(sampler="<b>nope</b>"))
        await painting.wait()
        shown = caption_of(painting)
        assert "&lt;b&gt;nope" in shown
        assert "<b>" not in shown
        assert (painting.pictures, visitor.pictures) == ([], [])

    tell(text_server.url, story)


def test_an_unreachable_server_is_a_message() -> None:
    async def story(server: Server) -> None:
        painting = Visitor().paint(server, order())
        await painting.wait()
        assert "diffserve serve" in (painting.error or "")

    tell("http://127.0.0.1:9", story)


def test_the_queue_position_is_shown_until_the_start() -> None:
    async def story(server: Server) -> None:
        painting = Visitor().paint(server, order())
        texts = {None: "Queued", 0: "Queued", 2: "Queued: position 3"}
        for queue_position, text in texts.items():
            painting.queue_position = queue_position
            assert progress_text(painting) == text
        painting.stop()
        await painting.wait()

    tell("http://127.0.0.1:9", story)


def test_several_images_have_one_progress() -> None:
    async def story(server: Server) -> None:
        several, best = (Painting(server, fields, lambda _: None) for fields in (order(n=3), order(best_of=4)))
        for painting in (several, best):
            painting.stop()
            await painting.wait()
            reports = [(0, 4), (1, 1), (2, 1), (1, 2)]
            shares = []
            for index, step in reports:
                far = Progress(id="1", image_index=index, step=step, steps=4, request_seconds_left=3.0)
                await painting._take(far)
                shares.append(painting.share)
            assert shares == sorted(shares)
        assert progress_text(several).startswith("0 of 3 finished, 58 % done, about 3 s left")
        assert progress_text(best).startswith("43 % done, ")
        await several._take(LostImage(id="1", image_index=0, failure=Failure(code="x", message="lost.")))
        assert progress_text(several).startswith("1 of 3 finished, 58 % done")

    tell("http://127.0.0.1:9", story)


def test_a_rate_limit_names_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, key = RateLimits(), Key(id="k", name="", digest=b"", scopes=(), created_s=0.0, requests_per_minute=1)

    async def story(server: Server) -> None:
        monkeypatch.setattr(server.client, "generate_stream", lambda *_, **__: limits.take(key))
        painting = Visitor().paint(server, order())
        await until(lambda: bool(painting.shut_out))
        assert progress_text(painting) == f"This key is limited to 1 requests per minute; {SHUT_OUT}"
        painting.stop()
        await painting.wait()

    limits.take(key)
    tell("http://127.0.0.1:9", story)


@pytest.mark.slow
def test_requests_to_a_full_server_are_retried(text_server: RunningServer) -> None:
    async def story(server: Server) -> None:
        greedy, patient = Visitor(), Visitor()
        long = greedy.paint(server, order(num_inference_steps=LONG, n=10))
        await until_step(long)
        while not long.shut_out:
            assert len(greedy.paintings) < 200
            long = greedy.paint(server, order(num_inference_steps=LONG, n=10))
            await asyncio.sleep(0.1)
        painting = patient.paint(server, order(n=10))  # one image may fit where ten do not
        await until(lambda: bool(painting.shut_out))
        assert progress_text(painting).endswith(f"; {SHUT_OUT}")
        greedy.stop()
        await painting.wait()
        assert (painting.error, len(painting.pictures), painting.shut_out) == (None, 10, "")

    tell(text_server.url, story)


@pytest.mark.slow
def test_a_gallery_and_the_list_of_visitors_are_bounded(text_server: RunningServer) -> None:
    async def story(server: Server) -> None:
        visitors = Visitors()
        first = visitors.of("0")
        painting = first.paint(server, order(num_inference_steps=1))
        await painting.wait()
        for _ in range(MAX_PICTURES + 5):
            first._take(painting.pictures[0])
        assert len(first.pictures) == MAX_PICTURES
        for number in range(1, MAX_VISITORS + 2):
            visitors.of(str(number)).pictures = first.pictures[:1]
        assert visitors.of("0") is not first

    tell(text_server.url, story)


def test_requests_without_a_session_share_nothing() -> None:
    async def story() -> None:
        visitors = Visitors()
        assert visitors.of(None) is not visitors.of(None)
        assert visitors.of("a") is visitors.of("a")
        visitors.leave(None)

    asyncio.run(story())


def test_news_wake_waiters_even_if_they_came_earlier() -> None:
    async def story() -> None:
        visitor = Visitor()
        news = visitor.news
        visitor._take(None)
        async with asyncio.timeout(SOON_S):
            await visitor.wait_for_news(news, 10 * SOON_S)
        waiting = asyncio.create_task(visitor.wait_for_news(visitor.news, 10 * SOON_S))
        await asyncio.sleep(0)
        visitor._take(None)
        async with asyncio.timeout(SOON_S):
            await waiting

    asyncio.run(story())
