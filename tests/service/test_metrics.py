"""Prometheus metrics: times from the final events of requests, the other values from the engine's snapshot."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from diffserve.api import ipc
from diffserve.api.engine_stats import (
    CacheStats,
    EngineStats,
    ImageStats,
    ModelStats,
    PageStats,
    ShareStats,
    StepTally,
    TenantPages,
    sum_of,
)
from diffserve.api.errors import NOT_FINITE, EngineUnavailable
from diffserve.api.rewrite_types import Rewrite, RewriteFinished
from diffserve.api.text_types import TextFinished, TextResult, TextStats, TextTimings, TextUsage
from diffserve.api.types import Cancelled, Event, Failed, Finished, GenerationRequest, ImageFailed, Progress
from diffserve.service.app import create_app
from diffserve.service.engine.client import EngineClient
from diffserve.service.engine.engines import Job
from diffserve.service.lifecycle import Gate
from diffserve.service.metrics import Metrics, watch_jobs, watch_store
from diffserve.settings.layers import load_settings
from diffserve.store import Database
from diffserve.store.batches import Batches, LineDone
from diffserve.store.deliveries import Deliveries
from diffserve.store.files import Files
from diffserve.store.jobs import Jobs
from tests.service.server import GENERATIONS, SOON_S, RunningServer, wait_for

TIMINGS = TextTimings(queue_s=0.0, ttft_s=0.03, tpot_s=0.004, total_s=0.1)
USAGE = TextUsage(prompt_tokens=40, output_tokens=9)
LOST: Any = {"request_id": "img", "image_index": 0, "code": "numerical_error"}
TALLY = StepTally()
for num_rows, seconds in ((1, 0.02), (2, 0.2), (2, None), (99, 9.0)):
    TALLY.add(num_rows, seconds)
STATS = EngineStats(
    num_live=5,
    num_wishes=2,
    images=ImageStats(
        num_running=3,
        num_waiting=1,
        num_steps=10,
        num_rows=64,
        num_painted=7,
        num_failed=1,
        busy_s=12.5,
        results=CacheStats(num_hits=3, num_misses=2, num_shared=1, num_evicted=4, num_bytes=500),
        latents=CacheStats(num_hits=6, num_misses=7, num_evicted=8, num_bytes=900),
    ),
    share=ShareStats(share=0.25, image_s=9.0, text_s=3.0),
    models=(
        ModelStats(
            name="m",
            is_loaded=True,
            images=ImageStats(
                num_running=3,
                num_waiting=1,
                num_steps=4,
                num_rows=104,
                num_painted=7,
                num_failed=1,
                busy_s=12.5,
                num_lanes=8,
                num_loras=2,
                lora_bytes=600,
                steps=TALLY.stats,
            ),
        ),
    ),
    texts=TextStats(
        num_running=4,
        num_waiting=6,
        prompt_tokens=400,
        cached_tokens=100,
        output_tokens=50,
        computed_tokens=360,
        draft_tokens=20,
        accepted_tokens=15,
        preemptions=2,
        entropy_sum=25.0,
        busy_s=5.0,
    ),
    pages=PageStats(
        num_pages=100,
        page_bytes=4096,
        free_pages=60,
        tenants=(
            TenantPages(
                tenant="llm", held_pages=30, idle_pages=10, evicted_pages=4, asked_tokens=400, found_tokens=100
            ),
        ),
    ),
)


def shown(metrics: Metrics, stats: EngineStats | None = None) -> dict[str, float]:
    """Return every sample by its name and labels, without histogram buckets."""
    asyncio.run(metrics.ask_database())
    families = text_string_to_metric_families(metrics.render(stats).decode())
    return {
        " ".join([sample.name.removeprefix("diffserve_"), *(f"{k}={v}" for k, v in sorted(sample.labels.items()))]): (
            sample.value
        )
        for family in families
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def finished(*entropies: float) -> TextFinished:
    results = tuple(
        TextResult(text_index=index, text="x", token_ids=(1,), finish_reason="stop", mean_entropy=entropy)
        for index, entropy in enumerate(entropies)
    )
    return TextFinished(request_id="a", results=results, usage=USAGE, timings=TIMINGS)


def test_answer_times_go_into_histograms_by_kind() -> None:
    metrics = Metrics()
    metrics.observe("text", finished(0.5, 1.5))
    metrics.observe("text", finished(0.1))
    values = shown(metrics)
    assert values["llm_time_to_first_token_seconds_count kind=text"] == 2
    assert values["llm_time_to_first_token_seconds_sum kind=text"] == pytest.approx(0.06)
    assert values["llm_time_per_output_token_seconds_sum kind=text"] == pytest.approx(0.008)
    assert values["llm_entropy_nats_count kind=text"] == 3
    assert values["engine_requests_total kind=text outcome=finished"] == 2


@pytest.mark.parametrize(
    ("event", "stage"),
    [
        *((ImageFailed(**LOST, message=f"{message}; try another."), stage) for stage, message in NOT_FINITE.items()),
        (Failed(request_id="img", code="numerical_error", message="the language model gave logits"), "text"),
        (ImageFailed(request_id="img", image_index=0, code="insufficient_memory", message="x"), ""),
    ],
)
def test_nonfinite_values_are_counted_by_stage(event: ipc.AnyEvent, stage: str) -> None:
    metrics = Metrics()
    metrics.observe("image", event)
    values = {name: value for name, value in shown(metrics).items() if name.startswith("nonfinite_total")}
    assert values == {
        f"nonfinite_total stage={stage_name}": float(stage_name == stage) for stage_name in (*NOT_FINITE, "text")
    }


def test_an_answer_of_one_token_has_no_time_per_later_token() -> None:
    metrics = Metrics()
    metrics.observe("text", msgspec.structs.replace(finished(0.5), usage=TextUsage(prompt_tokens=3, output_tokens=1)))
    values = shown(metrics)
    assert values["llm_time_to_first_token_seconds_count kind=text"] == 1
    assert values["llm_time_per_output_token_seconds_count kind=text"] == 0


def test_prompt_fallbacks_are_counted_by_reason() -> None:
    metrics = Metrics()
    taken = Rewrite(prompt="p", answer="p", mean_entropy=0.2)
    left = Rewrite(prompt="w", answer="?", mean_entropy=3.0, fallback="unsure", warning="the model was unsure.")
    event = RewriteFinished(
        request_id="a", rewrites=(taken, left), style="tags", model="m", usage=USAGE, timings=TIMINGS
    )
    metrics.observe("rewrite", event)
    values = shown(metrics)
    assert values["rewrite_fallbacks_total reason=unsure"] == 1
    assert values["llm_entropy_nats_sum kind=rewrite"] == pytest.approx(3.2)


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (Finished(request_id="a", num_painted=1, num_failed=0), "finished"),
        (Failed(request_id="a", code="c", message="m"), "failed"),
        (Cancelled(request_id="a"), "cancelled"),
    ],
)
def test_every_outcome_is_counted_by_kind(event: ipc.AnyEvent, outcome: str) -> None:
    metrics = Metrics()
    metrics.observe("image", event)
    metrics.ended("image", "rejected")
    values = shown(metrics)
    assert values[f"engine_requests_total kind=image outcome={outcome}"] == 1
    assert values["engine_requests_total kind=image outcome=rejected"] == 1


def test_the_engines_snapshot_is_exported_completely() -> None:
    values = shown(Metrics(), STATS)
    expected = {
        "up": 1,
        "live_requests": 5,
        "requests_waiting kind=image": 1,
        "requests_running kind=image": 3,
        "requests_waiting kind=wish": 2,
        "requests_waiting kind=text": 6,
        "requests_running kind=text": 4,
        "unet_rows_total model=m": 104,
        "cache_requests_total cache=image result=shared": 1,
        "cache_requests_total cache=latent result=hit": 6,
        "cache_requests_total cache=latent result=miss": 7,
        "cache_bytes cache=image": 500,
        "cache_evictions_total cache=latent": 8,
        "images_total model=m outcome=painted": 7,
        "busy_seconds_total side=images": 12.5,
        "shared_seconds_total side=texts": 3.0,
        "text_time_share": 0.25,
        "text_time_share_taken": 0.25,
        "llm_tokens_total type=output": 50,
        "llm_tokens_per_second": 10.0,
        "llm_prefix_hit_ratio": 0.25,
        "llm_speculative_acceptance_ratio": 0.75,
        "llm_entropy_mean_nats": 0.5,
        "kv_cache_usage_ratio": 0.3,
        "batch_slots model=m state=used": 3,
        "batch_slots model=m state=free": 5,
        "lora_bytes model=m": 600,
        "batch_size_count model=m": 4,
        "batch_size_sum model=m": 104,
        "denoise_step_seconds_count batch_bucket=2 model=m": 1,
        "denoise_step_seconds_sum batch_bucket=+Inf model=m": 9.0,
        "pool_pages": 100,
        "pool_free_pages": 60,
        "pages state=held tenant=llm": 30,
        "pages state=idle tenant=llm": 10,
        "pages_evicted_total tenant=llm": 4,
        "prefix_hit_ratio tenant=llm": 0.25,
    }
    assert {name: values[name] for name in expected} == expected


def test_an_unresponsive_engine_is_down_with_its_last_values() -> None:
    metrics = Metrics()
    assert shown(metrics)["up"] == 0
    assert "live_requests" not in shown(metrics)
    shown(metrics, STATS)
    values = shown(metrics)
    assert (values["up"], values["live_requests"]) == (0, 5)


def test_a_server_without_a_language_model_has_no_text_metrics() -> None:
    values = shown(Metrics(), msgspec.structs.replace(STATS, texts=None, pages=None))
    assert not [name for name in values if name.startswith(("llm_tokens", "pages", "pool", "kv_cache"))]
    assert values["busy_seconds_total side=texts"] == 0.0


def test_steps_of_several_engines_add_up() -> None:
    image_stats = ImageStats(
        num_running=0, num_waiting=0, num_steps=4, num_rows=104, num_painted=0, num_failed=0, busy_s=0.0,
        steps=TALLY.stats,
    )  # fmt: skip
    assert sum_of([]).steps == StepTally().stats
    assert sum_of([image_stats]).steps == TALLY.stats
    assert sum_of([image_stats, image_stats]).steps.num_steps == (2, 4, 0, 0, 0, 0, 2)
    assert sum(sum_of([image_stats, image_stats]).steps.seconds) == pytest.approx(2 * 9.22)


@pytest.mark.parametrize(
    ("status", "code", "outcome", "counted"),
    [
        (200, "", "success", ""),
        (400, "invalid_value", "client_error", ""),
        (429, "queue_full", "rejected", "requests_rejected_total reason=queue_full"),
        (429, "rate_limit_exceeded", "rejected", "requests_rejected_total reason=rate_limit"),
        (503, "engine_unavailable", "rejected", "requests_rejected_total reason=unready"),
        (503, "draining", "rejected", "requests_rejected_total reason=draining"),
        (504, "deadline_exceeded", "rejected", "requests_rejected_total reason=deadline"),
        (499, "client_closed_request", "cancelled", "client_disconnects_total phase=waiting"),
        (200, "client_closed_request", "cancelled", "client_disconnects_total phase=answering"),
        (200, "internal_error", "server_error", ""),
        (500, "a code that nobody knows", "server_error", ""),
    ],
)
def test_every_answer_has_an_outcome(status: int, code: str, outcome: str, counted: str) -> None:
    metrics = Metrics()
    metrics.answered("/v1/images/generations", status, code, 0.5)
    values = shown(metrics)
    assert values[f"requests_total endpoint=/v1/images/generations outcome={outcome} status={status}"] == 1
    assert values["request_duration_seconds_sum endpoint=/v1/images/generations"] == 0.5
    why = {name for name, value in values.items() if value and ("reason=" in name or "phase=" in name)}
    assert why == ({counted} if counted else set())


def test_client_input_never_becomes_a_label() -> None:
    async def say() -> tuple[str, str]:
        config = load_settings(env={})
        engine = EngineClient(config)
        app = create_app(engine, config.serve, Gate())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

            async def metrics_after(word: str) -> str:
                for path in (f"/{word}", f"/v1/models/{word}", f"/v1/images/generations/{word}/cancel"):
                    for method in ("GET", "POST", word):
                        headers = {"User-Agent": word, "Authorization": f"Bearer {word}", "X-Request-Id": word}
                        await client.request(method, path, headers=headers, json={"model": word, "prompt": word})
                return (await client.get("/metrics")).text

            first = await metrics_after("WORD0")
            for number in range(1, 20):
                last = await metrics_after(f"WORD{number}")
        return first, last

    first, last = asyncio.run(say())
    assert "WORD" not in last.upper()
    first, last = (re.sub(r" [-+.e\d]+$", "", text, flags=re.MULTILINE) for text in (first, last))
    assert set(last.splitlines()) - set(first.splitlines()) <= {
        line for line in last.splitlines() if 'endpoint="/metrics"' in line or "_created" in line
    }
    assert 'endpoint="/v1/models/{name:path}"' in last
    assert 'endpoint="/v1/images/generations/{request_id}/cancel"' in last


def test_the_store_exports_commits_log_size_and_open_batches(tmp_path: Path) -> None:
    now_s = 1000.0
    metrics, database = Metrics(), Database(tmp_path)
    batches = Batches(database, Files(database, 1 << 20), clock=lambda: now_s)
    watch_store(metrics, database, batches)
    with database.in_use():
        batch = batches.add("", "/v1/images/generations", "file-1", 5, {})
        batches.move(batch.id, "in_progress", of=["validating"])
        batches.finish_lines(batch.id, [LineDone(0, b"{}\n", False), LineDone(1, b"{}\n", True)])
        now_s += 60.0
        values = shown(metrics)
        assert values["db_commit_seconds_count"] == 3
        assert values["db_wal_bytes"] > 0
        by_status = [values[f"batches status={status}"] for status in ("validating", "in_progress", "finalizing")]
        assert (by_status, values["batch_lines_left"], values["oldest_batch_age_seconds"]) == ([0, 1, 0], 3, 60.0)
        batches.finish(batch.id, "completed")
        values = shown(metrics)
    over = ("batches status=in_progress", "batch_lines_left", "oldest_batch_age_seconds")
    assert [values[name] for name in over] == [0, 0, 0]


def test_the_store_exports_unfinished_jobs_and_deliveries(tmp_path: Path) -> None:
    database, metrics = Database(tmp_path), Metrics()
    jobs = Jobs(database)
    watch_jobs(metrics, jobs, Deliveries(database))
    for name in ("one", "two", "three"):
        output = {"put_url": "https://images.example.org/a", "status": "waiting"}
        jobs.add("", name, "/v1/images/generations", "{}", 60.0, output)
    jobs.pause("", "two")
    job = jobs.claim("server")
    assert job is not None
    jobs.finish(job, "succeeded", (200, b"{}"))
    values = shown(metrics)
    by_status = [values[f"jobs status={status}"] for status in ("queued", "running", "paused")]
    assert (by_status, values["deliveries_waiting"]) == ([1, 0, 1], 1)


def test_steps_without_an_image_are_counted_as_wasted_by_reason() -> None:
    def job(*steps: int) -> Job[Event]:
        new_job = Job[Event](GenerationRequest(prompt="a"), lambda _: None)
        for index, step in enumerate(steps):
            for before in range(1, step + 1):
                new_job.wasted_steps(Progress(request_id="a", image_index=index, step_index=before, num_steps=9))
        return new_job

    late = Failed(request_id="a", code="deadline_exceeded", message="x")
    assert job(3, 4).wasted_steps(late) == ("deadline", 7)
    assert job(2).wasted_steps(None) == ("cancelled", 2)
    assert job(2, 1).wasted_steps(EngineUnavailable("x")) == ("lost", 3)
    lost_job = job(5, 6)
    assert lost_job.wasted_steps(ImageFailed(request_id="a", image_index=0, code="x", message="x")) == ("failed", 5)
    assert lost_job.wasted_steps(None) == ("cancelled", 6)
    assert lost_job.wasted_steps(None) == ("cancelled", 0)


@pytest.mark.slow
def test_steps_for_a_disconnected_client_are_counted_as_wasted(server: RunningServer) -> None:
    def wasted() -> float:
        match = re.search(r'steps_wasted_total{reason="cancelled"} (\S+)', server.client.get("/metrics").text)
        assert match is not None
        return float(match[1])

    before = wasted()
    body = {"prompt": "a red fox", "num_inference_steps": 1000, "stream": True}
    with server.client.stream("POST", GENERATIONS, json=body) as response:
        lines = response.iter_lines()
        next(line for line in lines if re.search(r'"step":[1-9]', line))
    wait_for(lambda: wasted() > before, SOON_S, "wasted steps")
    server.wait_until_idle()
