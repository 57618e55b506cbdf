"""Text and rewrite jobs in a real engine process, which behave like image jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from diffserve.api.errors import InvalidRequest
from diffserve.api.rewrite_types import RewriteFinished, RewriteRequest
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import ChatMessage, TextDelta, TextFinished, TextRequest
from diffserve.api.types import DiffusionParams, GenerationRequest, ImageFinished, RewriteOptions
from diffserve.service.app import create_app
from diffserve.service.engine.client import EngineClient
from diffserve.service.lifecycle import Gate
from diffserve.service.metrics import add_metrics
from diffserve.settings.layers import load_settings
from tests.engine.combined.talker import save_talker
from tests.service.server import GENERATIONS, SOON_S, START_S, error_of

pytestmark = pytest.mark.slow

SAYS = "fox"
T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]
HELLO = (ChatMessage(role="user", content="hello"),)
ENDLESS = SamplingParams(temperature=1.0, max_tokens=4000, min_tokens=4000)


class Engine:
    """A client with a ready engine, and the event loop in which it runs."""

    def __init__(self, model: Path, language: Path | str) -> None:
        env = {"DIFFSERVE_TEXT_MODEL": str(language), "DIFFSERVE_MODEL_DTYPE": "float32"}
        env["DIFFSERVE_SERVE_SPARE_ENGINE"] = "false"
        self.loop = asyncio.new_event_loop()
        self.client = self.run(self._start(load_settings(model=str(model), env=env)))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, START_S))

    async def quiet(self) -> None:
        async with asyncio.timeout(SOON_S):
            while await self.client.num_requests():
                await asyncio.sleep(0.01)

    def close(self) -> None:
        self.run(self.client.stop())
        self.loop.close()

    @staticmethod
    async def _start(settings: Any) -> EngineClient:
        client = EngineClient(settings)
        client.start()
        while not client.is_ready:
            assert not client.failed.done(), client.failed.result()
            await asyncio.sleep(0.05)
        return client


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    talker = save_talker(tmp_path_factory.mktemp("talker") / "talker", SAYS)
    engine = Engine(tiny_model("sd15"), talker)
    yield engine
    engine.run(engine.quiet())
    engine.close()


def wish(**fields: Any) -> GenerationRequest:
    params = DiffusionParams(num_steps=2, sampler="ddim")
    return GenerationRequest(prompt="something cosy", width_px=64, height_px=64, diffusion=params, **fields)


async def events_of(job: Any) -> list[Any]:
    async with job:
        return [event async for event in job]


def test_the_engine_reports_its_language_model(engine: Engine) -> None:
    info = engine.client.text_info
    assert info is not None
    assert (info.model_id, info.has_chat_template) == ("talker", True)


def test_a_text_arrives_in_pieces_and_complete(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    events = engine.run(events_of(engine.client.submit(TextRequest(messages=HELLO, params=params))))
    assert isinstance(events[-1], TextFinished)
    assert events[-1].text == SAYS
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == SAYS


def test_a_wish_comes_back_as_a_prompt(engine: Engine) -> None:
    request = RewriteRequest(wish="something cosy", num_prompts=2)
    events = engine.run(events_of(engine.client.submit(request)))
    assert isinstance(events[-1], RewriteFinished)
    assert [rewrite.prompt for rewrite in events[-1].rewrites] == [SAYS, SAYS]


def test_an_image_is_generated_from_the_rewritten_prompt(engine: Engine) -> None:
    events = engine.run(events_of(engine.client.submit(wish(rewriting=RewriteOptions()))))
    (painted,) = [event for event in events if isinstance(event, ImageFinished)]
    assert (painted.result.prompt, painted.result.original_prompt) == (SAYS, "something cosy")


def test_leaving_a_text_cancels_it(engine: Engine) -> None:
    async def leave() -> None:
        async with engine.client.submit(TextRequest(prompt="x", params=ENDLESS)) as job:
            async for event in job:
                if isinstance(event, TextDelta):
                    break
        await engine.quiet()

    engine.run(leave())


def test_a_refused_text_raises_the_engines_error(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="context") as caught:
        engine.run(events_of(engine.client.submit(TextRequest(prompt="x" * 5000))))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    request = RewriteRequest(wish="x", options=RewriteOptions(style="cubist"))
    with pytest.raises(InvalidRequest, match="cubist"):
        engine.run(events_of(engine.client.submit(request)))


def test_prometheus_metrics_count_the_jobs(engine: Engine) -> None:
    app = FastAPI()
    add_metrics(app, engine.client.metrics, engine.client.stats)

    async def scrape() -> str:
        await events_of(engine.client.submit(TextRequest(prompt="x", params=SamplingParams(max_tokens=3))))
        await engine.quiet()
        async with AsyncClient(transport=ASGITransport(app=app), base_url="http://localhost") as client:
            response = await client.get("/metrics")
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/plain; version=")
            return response.text

    text = engine.run(scrape())
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines["diffserve_up"] == "1.0"
    assert float(lines['diffserve_engine_requests_total{kind="text",outcome="finished"}']) >= 1
    assert float(lines['diffserve_llm_tokens_total{type="output"}']) >= 3
    assert float(lines['diffserve_llm_time_to_first_token_seconds_count{kind="text"}']) >= 1
    assert float(lines['diffserve_pages{state="held",tenant="llm"}']) == 0


def test_work_past_its_deadline_is_504(engine: Engine) -> None:
    serve = load_settings(env={"DIFFSERVE_SERVE_REQUEST_TIMEOUT_S": "0.5"}).serve
    body = {"prompt": "a red fox", "num_inference_steps": 1000, "sampler": "ddim"}

    async def paint() -> httpx.Response:
        app = create_app(engine.client, serve, Gate())
        async with AsyncClient(transport=ASGITransport(app=app), base_url="http://127.0.0.1") as client:
            response = await client.post(GENERATIONS, json=body)
        assert await engine.client.num_requests() == 0
        return response

    response = engine.run(paint())
    assert response.status_code == 504
    assert error_of(response)["code"] == "deadline_exceeded"
    assert response.headers["x-should-retry"] == "false"
