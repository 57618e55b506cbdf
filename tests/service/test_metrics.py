"""What Prometheus reads: times from the events that end requests, the rest from the engine's snapshot."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from diffserve import ipc
from diffserve.engine_stats import CacheStats, EngineStats, ImageStats, PageStats, ShareStats, TenantPages
from diffserve.rewrite_types import Rewrite, RewriteFinished
from diffserve.service.metrics import Metrics
from diffserve.text_types import TextFinished, TextResult, TextStats, TextTimings, TextUsage
from diffserve.types import Cancelled, Failed, Finished

TIMINGS = TextTimings(queue_s=0.0, ttft_s=0.03, tpot_s=0.004, total_s=0.1)
USAGE = TextUsage(prompt_tokens=40, output_tokens=9)
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
    """Every sample by its name and labels, without histogram buckets."""
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


def test_times_of_answers_go_into_histograms_by_kind() -> None:
    metrics = Metrics()
    metrics.observe("text", finished(0.5, 1.5))
    metrics.observe("text", finished(0.1))
    found = shown(metrics)
    assert found["text_ttft_seconds_count kind=text"] == 2
    assert found["text_ttft_seconds_sum kind=text"] == pytest.approx(0.06)
    assert found["text_tpot_seconds_sum kind=text"] == pytest.approx(0.008)
    assert found["text_entropy_nats_count kind=text"] == 3
    assert found["requests_total kind=text outcome=finished"] == 2


def test_an_answer_of_one_token_has_no_time_per_later_token() -> None:
    metrics = Metrics()
    metrics.observe("text", msgspec.structs.replace(finished(0.5), usage=TextUsage(prompt_tokens=3, output_tokens=1)))
    found = shown(metrics)
    assert found["text_ttft_seconds_count kind=text"] == 1
    assert "text_tpot_seconds_count kind=text" not in found


def test_prompts_that_fell_back_are_counted_with_the_reason() -> None:
    metrics = Metrics()
    taken = Rewrite(prompt="p", answer="p", mean_entropy=0.2)
    left = Rewrite(prompt="w", answer="?", mean_entropy=3.0, fallback="unsure", warning="the model was unsure.")
    event = RewriteFinished(
        request_id="a", rewrites=(taken, left), style="tags", model="m", usage=USAGE, timings=TIMINGS
    )
    metrics.observe("rewrite", event)
    found = shown(metrics)
    assert found["rewrite_fallbacks_total reason=unsure"] == 1
    assert found["text_entropy_nats_sum kind=rewrite"] == pytest.approx(3.2)


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (Finished(request_id="a", num_painted=1, num_failed=0), "finished"),
        (Failed(request_id="a", code="c", message="m"), "failed"),
        (Cancelled(request_id="a"), "cancelled"),
    ],
)
def test_every_end_is_counted_by_kind(event: ipc.AnyEvent, outcome: str) -> None:
    metrics = Metrics()
    metrics.observe("image", event)
    metrics.ended("image", "rejected")
    found = shown(metrics)
    assert found[f"requests_total kind=image outcome={outcome}"] == 1
    assert found["requests_total kind=image outcome=rejected"] == 1


def test_the_engines_snapshot_is_shown_whole() -> None:
    found = shown(Metrics(), STATS)
    expected = {
        "up": 1,
        "live_requests": 5,
        "queue kind=image state=waiting": 1,
        "queue kind=image state=running": 3,
        "queue kind=wish state=waiting": 2,
        "queue kind=text state=waiting": 6,
        "queue kind=text state=running": 4,
        "unet_rows_total": 64,
        "image_cache_total outcome=shared": 1,
        "latent_cache_total outcome=hit": 6,
        "latent_cache_total outcome=miss": 7,
        "cache_bytes cache=image": 500,
        "cache_evictions_total cache=latent": 8,
        "images_total outcome=painted": 7,
        "busy_seconds_total side=images": 12.5,
        "shared_seconds_total side=texts": 3.0,
        "text_time_share": 0.25,
        "text_time_share_taken": 0.25,
        "text_tokens_total what=output": 50,
        "text_tokens_per_second": 10.0,
        "text_prefix_hit_ratio": 0.25,
        "text_speculative_acceptance_ratio": 0.75,
        "text_entropy_mean_nats": 0.5,
        "pool_pages": 100,
        "pool_free_pages": 60,
        "pages state=held tenant=llm": 30,
        "pages state=idle tenant=llm": 10,
        "pages_evicted_total tenant=llm": 4,
        "prefix_hit_ratio tenant=llm": 0.25,
    }
    assert {name: found[name] for name in expected} == expected


def test_an_engine_that_does_not_answer_is_down_and_shown_as_it_was() -> None:
    metrics = Metrics()
    assert shown(metrics)["up"] == 0
    assert "live_requests" not in shown(metrics)
    shown(metrics, STATS)
    found = shown(metrics)
    assert (found["up"], found["live_requests"]) == (0, 5)


def test_a_server_without_a_language_model_shows_nothing_of_texts() -> None:
    found = shown(Metrics(), msgspec.structs.replace(STATS, texts=None, pages=None))
    assert not [name for name in found if name.startswith(("text_tokens", "pages", "pool"))]
    assert found["busy_seconds_total side=texts"] == 0.0
