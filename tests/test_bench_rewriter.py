"""The rewriter benchmark's parts that are not time, and one small run of all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rewriter_arms import WARM_UPS, Desk, Measure, compared, figures, in_turns
from diffserve.api.text_types import TextConfig
from diffserve.engine.text import TextEngine
from diffserve.rewriting import load_style
from diffserve.runtime.language import load_language_model
from tests.benches import run_bench
from tests.engine.rewriting import scripted

SCRIPT = {"zebra": "nobody wishes for one"}


def test_arms_take_turns_at_going_first_and_warming_up_does_not_count() -> None:
    order: list[str] = []

    def arm(name: str) -> Measure:
        order.append(name)
        return Measure(1.0, 1.0, len(order))

    measurements = in_turns({"ours": lambda: arm("ours"), "theirs": lambda: arm("theirs")}, 2)
    assert WARM_UPS == 2
    assert order == ["theirs", "ours", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert [measurement.tokens for measurement in measurements["theirs"]] == [5, 8]


def test_a_comparison_reports_medians_and_pairs() -> None:
    assert compared([1.0, 4.0, 3.0], [2.0, 2.0, 4.0]) == {"of_medians": 1.5, "median_of_pairs": 0.75}
    assert figures([0.001, 0.003, 0.002], 1e3) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_no_wish_comes_twice_and_cold_shares_nothing(tmp_path: Path) -> None:
    model = load_language_model(scripted.save(tmp_path / "told", SCRIPT), dtype="float32", device="cpu")
    desk = Desk(TextEngine.from_model(model, TextConfig()), load_style("tags"), "be brief, " * 8)
    prompts = [*desk.prompts(20, with_system=True), *desk.prompts(20, with_system=False)]
    assert len(set(prompts)) == 40
    assert all(prompt.startswith("system: be brief, ") for prompt in prompts[:20])
    cached = desk.texts.scheduler
    for is_warm in (True, False, True):
        before = cached.num_cached_tokens
        assert desk.first_tokens(3, is_warm=is_warm).tokens == 3
        assert (cached.num_cached_tokens > before) == is_warm
    expected = desk.decoding(desk.prompts(1, with_system=False)[0], "off")
    assert expected.tokens == 0, "the model ends at once, and the first token does not count"


@pytest.mark.slow
def test_a_small_run_writes_what_it_prints(tmp_path: Path) -> None:
    from diffserve.training.rewriter_model import build_rewriter, build_tokenizer, export_rewriter

    tokenizer = build_tokenizer(num_wishes=500)
    model = export_rewriter(tmp_path / "tiny", build_rewriter(tokenizer), tokenizer)
    options = ["--model", model, "--rounds", 1, "--threads", 1, "--dtype", "float32"]
    written = run_bench("bench_rewriter", *options, out=tmp_path / "found.json")
    assert written["command"].startswith("python benchmarks/bench_rewriter.py --model tiny --rounds 1")
    assert written["crowd"]["equal_answers"] == "8 of 8"
    assert {"8 at once", "alone", "goal"} == written["first"].keys()
    assert written["lookup"]["as the rewriter asks"]["drafted_tokens"] > 0
