"""Evaluation of the rewriter by images: pairs of images, the gain with its interval, and entropy thresholds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diffserve.api.rewrite_types import Rewrite
from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.training.eval.rewriter import (
    SEED,
    PairedResult,
    compare,
    gain,
    held_out_captions,
    mean_interval,
    summarise,
)
from diffserve.training.wishes import LooseWish, held_out_wishes, in_groups, shows
from tests.engine.rewriting import scripted

WISHES = held_out_wishes(20)


def paired(wish: LooseWish, *, plain: bool, rewritten: bool, entropy: float = 0.1, prompt: str = "") -> PairedResult:
    text = prompt or wish.caption
    return PairedResult(wish, Rewrite(prompt=text, answer=text, mean_entropy=entropy), plain, rewritten)


def test_the_gain_is_in_points_and_its_interval_holds_it() -> None:
    results = [paired(wish, plain=at < 5, rewritten=at < 15) for at, wish in enumerate(WISHES)]
    result = gain(results, 1.0)
    assert (result.count, result.plain, result.rewritten, result.gain) == (20, 5, 15, 50.0)
    assert 20 < result.low < 50 < result.high < 80
    assert (result.taken, result.granted) == (20, 20)


def test_a_doubtful_or_refused_rewrite_counts_with_the_picture_of_the_wish() -> None:
    sure = paired(WISHES[0], plain=False, rewritten=True)
    unsure = replace(sure, rewrite=Rewrite(prompt=WISHES[0].caption, answer="", mean_entropy=0.9))
    fallen = replace(
        sure, rewrite=Rewrite(prompt=WISHES[0].text, answer="", mean_entropy=0.0, fallback="empty", warning="nothing")
    )
    assert [result.is_exact(0.5) for result in (sure, unsure, fallen)] == [True, False, False]
    assert [result.is_exact(1.0) for result in (sure, unsure, fallen)] == [True, True, False]
    assert [result.is_granted(0.5) for result in (sure, unsure, fallen)] == [True, False, False]
    assert gain([sure, unsure, fallen], 0.5).taken == 1


def test_prompts_with_other_content_are_not_granted() -> None:
    other = next(wish for wish in WISHES[1:] if wish.caption != WISHES[0].caption)
    assert not paired(WISHES[0], plain=True, rewritten=True, prompt=other.caption).is_granted(1.0)
    assert not paired(WISHES[0], plain=True, rewritten=True, prompt="no caption").is_granted(1.0)


def test_intervals_shrink_with_more_values_and_are_nothing_without_spread() -> None:
    assert mean_interval([]) == (0.0, 0.0)
    assert mean_interval([100.0] * 9) == (100.0, 100.0)
    few, many = mean_interval([0.0, 100.0] * 5), mean_interval([0.0, 100.0] * 500)
    assert few[0] < many[0] < 50 < many[1] < few[1]
    assert mean_interval([0.0, 100.0] * 5) == few


def test_groups_part_the_wishes_and_the_document_holds_every_pair() -> None:
    results = [paired(wish, plain=False, rewritten=True) for wish in WISHES]
    groups = in_groups(WISHES)
    assert len(groups["complete"]) + len(groups["vague"]) == len(groups["all"]) == 20
    assert len(groups["by hand"]) == 8
    document = summarise(results, results[:3], max_entropy=1.0, head={"model": "m"})
    assert (document["model"], document["wishes"]["all"]["gain"], document["captions"]["count"]) == ("m", 100.0, 3)
    assert len(document["trials"]["wishes"]) == 20
    assert {row["wishes_exact"] for row in document["thresholds"]} == {20}


def test_held_out_captions_are_complete_wishes_in_the_image_models_words() -> None:
    captions = held_out_captions(30)
    assert all(caption.requirements.complete for caption in captions)
    assert any(caption.text != caption.caption for caption in captions), (
        "the image model knows more words than one style has"
    )


@pytest.mark.slow
def test_a_wish_and_its_rewrite_are_painted_with_one_seed_and_both_are_looked_at(tmp_path: Path) -> None:
    from diffserve.engine import Engine
    from diffserve.engine.rewriter import Rewriter
    from diffserve.engine.text import TextEngine
    from diffserve.rewriting import TextWindow

    wishes = [wish for wish in held_out_wishes(60) if wish.requirements.complete and "'" not in wish.text][:2]
    script = {wish.text: wish.caption for wish in wishes}
    model = scripted.save(tmp_path / "told", script)
    engine = Engine.from_pretrained("embedded")
    texts = TextEngine.from_pretrained(model, dtype="float32", device="cpu")
    rewriter = Rewriter(texts, style="tags", window=TextWindow.of(engine.model.text))
    how = DiffusionParams(sampler="ddim", num_steps=6, guidance_scale=3.0)
    results = compare(engine, rewriter, wishes, how)
    assert [result.rewrite.prompt for result in results] == [wish.caption for wish in wishes]
    for index, result in enumerate(results):
        for prompt, verdict in ((result.wish.text, result.plain), (result.rewrite.prompt, result.rewritten)):
            [alone] = engine.generate(GenerationRequest(prompt=prompt, seed=SEED + index, diffusion=how))
            assert shows(alone.pixels, result.wish.requirements) == verdict
