"""The Create tab as one page shows it: its messages, and the image to which its buttons refer."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from diffserve.api.errors import EngineUnavailable
from diffserve.media.images import decode_image
from tests.service.server import SOON_S, RunningServer
from tests.ui.gradio_request import Request
from ui.captions import ASK, EARLY, OLDER, STOPPING
from ui.create.adapters import AdapterHandlers
from ui.create.handlers import CreateHandlers, settings_of
from ui.create.view import OF_PICTURE, PARTS, Screen
from ui.server import Models, Server
from ui.visitors import Visitors

pytestmark = pytest.mark.slow
LONG = "1000"
BUTTONS = ("reuse_seed", "vary", "copy_parameters", "download")
NAMES = (*inspect.signature(CreateHandlers.generate).parameters,)[1:-1]
FORM: dict[str, Any] = {
    "prompt": "a red fox", "negative_prompt": "", "quality": "draft", "aspect": "square", "count": 1,
    "rewrite_mode": "Off", "steps": "2", "seed": "3",
}  # fmt: skip


class Page:
    """An open page; ``shown`` holds the newest values of its components from all requests."""

    def __init__(self, server: Server) -> None:
        self.shown: dict[str, Any] = {}
        self.visitors = Visitors()
        self.server = server
        self._events = CreateHandlers(server, self.visitors, None)  # type: ignore[arg-type]

    @property
    def caption(self) -> str:
        return str(self.shown["caption"])

    def ask(self, **fields: Any) -> AsyncIterator[Sequence[Any]]:
        """Press Generate."""
        values = FORM | fields
        return self._events.generate(*(values.get(name, "") for name in NAMES), Request())

    def vary(self, parameters: str) -> AsyncIterator[Sequence[Any]]:
        """Press Make variations of the image with ``parameters``."""
        return self._events.vary(parameters, "", Request())  # type: ignore[arg-type]

    async def choose_control(self, file: Path) -> list[Any]:
        """Choose the image of a ControlNet and return its field's content and the caption."""
        adapters = AdapterHandlers(self.server, self.visitors, None)  # type: ignore[arg-type]
        return await adapters.read_control(str(file), Request())  # type: ignore[arg-type]

    def stop(self) -> None:
        self.visitors.of(Request.session_hash).stop(keeps_unfinished=True)

    async def choose(self, index: int) -> None:
        """Click one of the images of a request."""
        news = zip(PARTS, await self._events.look_closer(index, Request()), strict=True)  # type: ignore[arg-type]
        self.shown |= {name: value for name, value in news if value != gr.skip()}

    def apply(self, updates: Sequence[Any]) -> None:
        """Apply the updates of an event."""
        self.shown |= {name: value for name, value in zip(PARTS, updates, strict=True) if value != gr.skip()}

    async def press(self, name: str) -> None:
        """Press Favorite or Delete below the image on display."""
        handler = {"favorite": self._events.favorite, "delete": self._events.delete}[name]
        self.apply(await handler({"path": self.shown["picture"]}, Request()))  # type: ignore[arg-type]

    async def act(self, action: object, job: object = "") -> str:
        """Press a button of the queue and return what it lists then."""
        self.apply(await self._events.queue.act([{"action": action, "job": job}], Request()))  # type: ignore[arg-type]
        return str(self.shown["queue"])

    async def look_at_queue(self) -> str:
        """Fire the timer of the queue and return the HTML of the queue afterwards."""
        self.apply(await self._events.queue.act([], Request()))  # type: ignore[arg-type]
        return str(self.shown["queue"])

    async def validate(self, **fields: Any) -> dict[str, str]:
        """Return the message at each invalid field, as Generate shows it."""
        values = FORM | fields
        sent = [*(values.get(name, "") for name in NAMES), Request()]
        results = await self._events.validate(*sent)
        messages = zip(NAMES, results, strict=True)
        invalid = {name: result["message"] for name, result in messages if not result["is_valid"]}
        checks = [{"field": name, "message": text} for name, text in invalid.items()]
        assert await self._events.check(*sent) == (checks[0] if checks else None)
        return invalid

    async def reuse(self) -> list[Any]:
        """Press Reuse settings and return the fields and the caption."""
        return await self._events.reuse_settings(self.shown["parameters"], Request())  # type: ignore[arg-type]

    async def look(self, request: AsyncIterator[Sequence[Any]]) -> None:
        """Apply the next update of ``request``."""
        news = zip(PARTS, await anext(request), strict=True)
        self.shown |= {name: value for name, value in news if value != gr.skip()}

    async def until(self, request: AsyncIterator[Sequence[Any]], is_so: Callable[[], object]) -> None:
        """Apply updates of ``request`` until ``is_so``."""
        async with asyncio.timeout(SOON_S):
            await self.look(request)
            while not is_so():
                await self.look(request)

    async def finish(self, request: AsyncIterator[Sequence[Any]]) -> None:
        """Apply all remaining updates of ``request``."""
        async with asyncio.timeout(SOON_S):
            try:
                while True:
                    await self.look(request)
            except StopAsyncIteration:
                return


def tell(running: RunningServer, story: Callable[[Page], Awaitable[None]]) -> None:
    async def run() -> None:
        server = Server(running.url)
        try:
            await story(Page(server))
        finally:
            await server.close()

    asyncio.run(run())


@pytest.mark.parametrize(("fields", "message"), [({"prompt": " "}, "prompt is empty"), ({"sampler": "nope"}, "nope")])
def test_a_failure_is_shown_next_to_a_running_request_until_another_starts(
    server: RunningServer, fields: dict[str, str], message: str
) -> None:
    async def story(page: Page) -> None:
        painting = page.ask(steps=LONG)
        await page.until(painting, lambda: "step " in page.caption)
        assert message not in page.caption
        await page.finish(page.ask(**fields))
        async with asyncio.timeout(SOON_S):
            while message not in page.caption:  # a sampler is checked when the job begins
                await page.look_at_queue()
        assert 'role="alert"' in page.caption
        await page.until(painting, lambda: re.search(rf"step \d+ of {LONG}", page.caption))
        assert message in page.caption
        another = page.ask(steps=LONG, seed="4")
        await page.finish(another)
        await page.until(painting, lambda: "1 more queued" in page.caption)
        assert message not in page.caption
        await page.act("clear")
        assert await page.act("clear-finished") == ""
        page.stop()
        await page.finish(painting)
        assert "Stopped" in page.caption
        assert OLDER not in page.caption

    tell(server, story)


def test_a_failure_is_still_shown_when_the_other_request_is_done(server: RunningServer) -> None:
    async def story(page: Page) -> None:
        painting = page.ask()
        await page.look(painting)
        await page.finish(page.ask(prompt=""))
        await page.finish(painting)
        assert "Generated in" in page.caption
        assert "prompt is empty" in page.caption
        await page.finish(page.ask())
        assert "prompt is empty" not in page.caption

    tell(server, story)


def test_variations_are_generated_at_once_from_the_parameters_of_an_image(server: RunningServer) -> None:
    async def story(page: Page) -> None:
        await page.finish(page.ask(prompt="a crown", seed="8"))
        parameters = page.shown["parameters"]
        await page.finish(page.vary(parameters))
        assert re.search(r"4 images, .*variation 0\.15, seed 8, variation seeds \d+ to \d+", page.caption)
        pictures = page.visitors.of(Request.session_hash).batch
        assert {picture.seed for picture in pictures} == {8}
        assert len({picture.variation_seed for picture in pictures}) == 4
        await page.finish(page.vary(f"{parameters}, Variation seed: 3, Variation seed strength: 1.5"))
        assert 'role="alert"' in page.caption
        await page.finish(page.vary("x" * 20_000))
        assert "The parameters of this image have 20000 bytes" in page.caption

    tell(server, story)


def test_buttons_refer_only_to_the_complete_image_that_is_shown(server: RunningServer) -> None:
    def can_be_used(page: Page) -> set[bool]:
        return {page.shown[name]["interactive"] for name in BUTTONS}

    async def story(page: Page) -> None:
        await page.finish(page.ask())
        fields_of_image = {name: page.shown[name] for name in OF_PICTURE}
        assert "Seed: 3" in fields_of_image["parameters"]
        assert can_be_used(page) == {True}
        painting = page.ask(steps=LONG, seed="4")
        await page.until(painting, lambda: Path(page.shown["picture"]).name.startswith("preview-"))
        assert can_be_used(page) == {False}
        assert (page.shown["painted_from"], page.shown["parameters"]) == ("", "")
        page.stop()
        await page.finish(painting)
        assert "Stopped" in page.caption
        assert "Seed: 4" in page.shown["parameters"]
        assert can_be_used(page) == {True}
        assert page.shown["picture"] != fields_of_image["picture"]

    tell(server, story)


def test_stop_shows_the_unfinished_image(server: RunningServer) -> None:
    async def story(page: Page) -> None:
        painting = page.ask(steps=LONG)
        await page.until(painting, lambda: re.search(rf"step [1-9]\d* of {LONG}", page.caption))
        page.stop()
        await page.until(painting, lambda: STOPPING in page.caption or "Stopped" in page.caption)
        await page.finish(painting)
        [steps] = re.findall(rf"Stopped at step (\d+) of {LONG}. It is not finished.", page.caption)
        assert 0 < int(steps) < int(LONG)
        assert f"Interrupted after: {steps}," in page.shown["parameters"]
        assert decode_image(Path(page.shown["picture"]).read_bytes()).width_px == 64
        assert len(page.shown["gallery"]["value"]) == 1
        form, notes = settings_of(page.shown["parameters"], await page.server.models())
        assert form.seed == "3"
        assert any(f"interrupted after {steps} of {LONG} steps" in note for note in notes)

    tell(server, story)


def test_second_stop_does_not_wait_for_the_unfinished_image(server: RunningServer) -> None:
    async def story(page: Page) -> None:
        painting = page.ask(steps=LONG)
        await page.until(painting, lambda: page.shown.get("picture"))
        page.stop()
        page.stop()
        await page.finish(painting)
        assert "Stopped at step" in page.caption
        assert page.shown["picture"] is None
        assert not any(page.shown[name]["interactive"] for name in BUTTONS)

    tell(server, story)


def test_only_changes_are_sent_but_a_new_image_brings_its_texts_and_buttons() -> None:
    screen = Screen()

    def sent(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in zip(PARTS, screen.draw(**values), strict=True) if value != gr.skip()}

    assert sent(picture="a", parameters="", caption="step 1") == {"picture": "a", "parameters": "", "caption": "step 1"}
    assert sent(picture="a", parameters="", caption="step 2") == {"caption": "step 2"}
    assert sent(picture="b", parameters="", caption="step 2") == {"picture": "b", "parameters": ""}
    sent(gallery={"value": "a", "__type__": "update"})["gallery"].clear()  # gradio changes what it gets
    assert sent(gallery={"value": "a", "__type__": "update"}) == {}


def test_a_click_before_the_models_are_loaded_waits_for_them(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(page: Page) -> None:
        loaded, is_loaded = Server.models, asyncio.Event()

        async def models(self: Server, *, is_fresh: bool = False) -> Models:
            if not is_loaded.is_set():
                raise EngineUnavailable("the engine is loading its models.")
            return await loaded(self, is_fresh=is_fresh)

        monkeypatch.setattr(Server, "models", models)
        monkeypatch.setattr("ui.create.painting.LOOK_AGAIN_S", 0.01)
        request = page.ask()
        await page.until(request, lambda: EARLY in page.caption)
        assert page.shown["stop"]["visible"] is True
        is_loaded.set()
        await page.finish(request)
        assert "Generated in" in page.caption
        given_up = page.ask(sampler="nope")
        is_loaded.clear()
        await page.until(given_up, lambda: EARLY in page.caption)
        page.stop()
        await page.finish(given_up)
        assert "Stopped" in page.caption
        assert OLDER in page.caption

    tell(server, story)


def test_several_images_are_shown_together_and_the_buttons_refer_to_the_selected_one(server: RunningServer) -> None:
    async def story(page: Page) -> None:
        await page.finish(page.ask(count=3))
        together = page.shown["batch"]
        assert together["visible"]
        assert [caption for _, caption in together["value"]] == ["seed 3", "seed 4", "seed 5"]
        assert "3 images" in page.caption
        assert "seeds 3 to 5" in page.caption
        assert "Seed: 3" in page.shown["parameters"], "the first one is selected"
        assert all(page.shown[name]["interactive"] for name in BUTTONS)
        await page.choose(1)
        assert page.shown["batch"]["visible"]
        assert "Seed: 4" in page.shown["parameters"]
        assert page.shown["download"]["value"] == page.shown["picture"]
        await page.press("delete")
        assert page.shown["delete"]["value"] == ASK
        await page.press("delete")
        assert [caption for _, caption in page.shown["batch"]["value"]] == ["seed 3", "seed 5"]
        assert "Seed: 3" in page.shown["parameters"]
        await page.finish(page.ask())
        assert not page.shown["batch"]["visible"]

    tell(server, story)


def test_a_favorite_is_marked_in_the_history_and_a_deleted_image_leaves_it(server: RunningServer) -> None:
    async def story(page: Page) -> None:
        await page.finish(page.ask(prompt="a crown of glass"))
        client, visitor = page.server.client, page.visitors.of(Request.session_hash)

        async def stored() -> list[bool]:
            return [entry.favorite for entry in (await client.history(q="a crown of glass")).data]

        before = await stored()
        await page.press("favorite")
        assert page.shown["favorite"]["value"] == "Remove favorite"
        assert await stored() == [True, *before[1:]]
        await page.press("favorite")
        assert await stored() == before
        await page.press("delete")
        await page.press("delete")
        assert await stored() == before[1:]
        assert (visitor.pictures, page.shown["picture"]) == ([], None)
        await page.press("delete")
        assert "no longer exists" in page.caption

    tell(server, story)


def test_waiting_requests_are_jobs_that_are_listed_and_cancelled_alone_or_together(server: RunningServer) -> None:
    async def story(page: Page) -> None:
        first = page.ask(steps=LONG)
        await page.until(first, lambda: "step " in page.caption)
        for prompt in ("<i>an owl", "a dog", "a cat"):
            await page.finish(page.ask(prompt=prompt, steps=LONG, seed="9"))
        assert page.shown["queue"].count("<li>") == 3
        assert "&lt;i&gt;an owl" in page.shown["queue"]
        [job, *_] = re.findall(r'data-action="cancel" data-job="([\w-]+)"', page.shown["queue"])
        for odd in (None, 1, [1], "", "none", "../files", "a/b?c"):
            assert (await page.act("cancel", odd)).count("<li>") == 3
        for odd in (None, 7, "explode"):
            assert (await page.act(odd, job)).count("<li>") == 3
        assert "an owl" not in await page.act("cancel", job)
        assert await page.act("clear") == ""
        assert len(page.visitors.of(Request.session_hash).paintings) == 1
        page.stop()
        await page.finish(first)

    tell(server, story)


def test_images_of_a_job_are_shown_once_and_again_on_request(server: RunningServer) -> None:
    async def story(page: Page) -> None:
        first = page.ask(steps=LONG)
        await page.until(first, lambda: "step " in page.caption)
        await page.finish(page.ask(prompt="a dog", count=2, steps="100", seed="9"))
        page.stop()
        await page.finish(first)
        visitor = page.visitors.of(Request.session_hash)
        num_before = len(visitor.pictures)
        async with asyncio.timeout(SOON_S):
            while "Finished" not in await page.look_at_queue():
                await asyncio.sleep(0.1)
        assert re.search("2 images, 100 steps, .*seeds 9, 10", page.caption)
        assert "data-open" not in await page.look_at_queue()
        assert len(visitor.pictures) == num_before + 2
        page.shown["caption"] = ""
        [job] = re.findall(r'data-action="show" data-job="([\w-]+)"', page.shown["queue"])
        await page.act("show", job)
        assert "seeds 9, 10" in page.caption
        visitor.pictures.clear()
        await page.act("show", job)
        assert [picture.seed for picture in visitor.pictures] == [10, 9]
        assert {picture.history_id for picture in visitor.pictures} != {""}
        await page.act("retry", job)
        assert "only a job that failed" in page.caption
        await page.act("show", "page-none")
        assert "no longer in the queue" in page.caption
        assert await page.act("clear-finished") == ""

    tell(server, story)


def test_an_invalid_value_is_an_error_at_its_field(server: RunningServer) -> None:
    async def story(page: Page) -> None:
        assert await page.validate() == {}
        assert await page.validate(steps=None, guidance=2.5) == {}
        for field, value, message in (
            ("prompt", " ", "prompt is empty"),
            ("steps", 0, "0"),
            ("steps", 2.5, "2.5"),
            ("guidance", 31, "from 0 to 30"),
            ("eta", 1.5, "from 0 to 1"),
            ("size", "big", "big"),
            ("seed", "x", "whole number"),
            ("loras", "nope:1", "nope"),
        ):
            messages = await page.validate(**{field: value})
            assert list(messages) == [field]
            assert message in messages[field]

    tell(server, story)


def test_settings_of_an_image_are_reused(server: RunningServer) -> None:
    async def story(page: Page) -> None:
        await page.finish(page.ask(prompt="a crown", guidance=2.5, seed="5"))
        *values, caption, _ = await page.reuse()
        form = dict(zip(NAMES, values, strict=False))
        assert (form["prompt"], form["guidance"], form["seed"]) == ("a crown", 2.5, "5")
        assert "Settings loaded" in caption

    tell(server, story)
