"""Loading a studio from settings: which parts are loaded, onto which pool, and the errors for missing parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from diffserve.api.errors import ConfigError, ModelNotFound
from diffserve.api.text_types import TextRequest
from diffserve.api.types import GenerationRequest, ImageFinished
from diffserve.engine.combined_engine import CombinedEngine
from diffserve.rewriting import style
from diffserve.runtime.kv import PagePlan
from diffserve.runtime.text.conditioning import AUTO_TEXT_TOKENS, wanted_bytes
from diffserve.settings.layers import load_settings
from tests.engine.combined.conftest import SAYS
from tests.engine.combined.talker import save_talker

Model = Callable[[str], Path]


def load(
    tiny_model: Model, *, cross_attention: Literal["paged", "plain"] = "paged", **variables: Any
) -> CombinedEngine:
    """Load the studio of the tiny image model, with settings from environment variables."""
    env = {"DIFFSERVE_MODEL_DTYPE": "float32", "DIFFSERVE_TEXT_DTYPE": "float32", "DIFFSERVE_ENGINE_MAX_ROWS": "8"}
    env |= {f"DIFFSERVE_{name.upper()}": str(value) for name, value in variables.items()}
    settings = load_settings(model=str(tiny_model("sd15")), env=env)
    return CombinedEngine.from_settings(
        replace(settings, engine=replace(settings.engine, cross_attention=cross_attention))
    )


def test_settings_name_both_models_and_they_share_one_pool(tiny_model: Model, talker_directory: Path) -> None:
    studio = load(tiny_model, text_model=talker_directory, text_time_share=0.4, engine_kv_pool_bytes=1 << 23)
    assert studio.text_info is not None
    assert studio.text_info.model_id == "talker"
    assert studio.rewriter is not None
    assert studio.rewriter.style.name == "tags", "what Stable Diffusion 1.x reads best"
    assert studio.share.share == 0.4
    assert studio.texts is not None
    assert studio.pool is studio.texts.pool is studio.engine.pool
    assert studio.pool.num_pages * studio.pool.page_bytes <= 1 << 23
    studio.warm_up()
    assert not studio.has_work
    assert studio.texts.cost.line != (0.0, 0.0)
    assert studio.rewriter.rewrite("anything")[0].prompt == SAYS
    studio.check_integrity()


def test_pool_of_automatic_size_is_the_sum_of_what_both_sides_want(tiny_model: Model, talker_directory: Path) -> None:
    studio = load(tiny_model, text_model=talker_directory, engine_kv_pool_bytes="auto", text_max_sequences=5)
    assert studio.pool is not None
    tenants = studio.pool.stats().tenants
    specs = {name: studio.pool.plan(name).spec for name in tenants}
    texts = [spec for name, spec in specs.items() if name == "llm"]
    images = sorted((spec for name, spec in specs.items() if name != "llm"), key=lambda spec: not spec.whole_sequences)
    window_tokens = studio.engine.model.text.window_tokens
    only_images = wanted_bytes([images], [], window_tokens, 5)
    assert studio.pool.num_pages * studio.pool.page_bytes == wanted_bytes([images], texts, window_tokens, 5)
    text_pages = PagePlan(texts[0], studio.pool.page_bytes).num_pages(AUTO_TEXT_TOKENS)
    assert studio.pool.num_pages == only_images // studio.pool.page_bytes + 5 * text_pages


def test_texts_have_a_pool_of_their_own_where_images_use_none(tiny_model: Model, talker_directory: Path) -> None:
    studio = load(tiny_model, text_model=talker_directory, cross_attention="plain")
    assert studio.engine.pool is None
    assert studio.pool is not None
    assert set(studio.pool.stats().tenants) == {"llm"}
    studio.submit(TextRequest(prompt="x"))
    studio.submit(GenerationRequest(prompt="a fox", width_px=64, height_px=64))
    assert sum(isinstance(event, ImageFinished) for event in studio.events()) == 1
    studio.check_integrity()


def test_a_draft_model_is_a_tenant_of_the_same_pool(tiny_model: Model, talker_directory: Path) -> None:
    studio = load(tiny_model, text_model=talker_directory, text_draft_model=talker_directory)
    assert studio.pool is not None
    assert {"llm", "llm_draft"} < set(studio.pool.stats().tenants)


def test_a_missing_rewriter_is_reported_and_images_are_generated(
    tiny_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(style, "DIRECTORY", tmp_path / "nowhere")
    with caplog.at_level(logging.WARNING):
        studio = load(tiny_model, text_model="embedded")
    assert (studio.texts, studio.rewriter, studio.text_info) == (None, None, None)
    assert "no language model is loaded" in caplog.text
    studio.submit(GenerationRequest(prompt="a fox", width_px=64, height_px=64))
    assert sum(isinstance(event, ImageFinished) for event in studio.events()) == 1


def test_the_rewriter_that_was_shipped_has_a_name_of_its_own(
    tiny_model: Model, talker_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(style, "DIRECTORY", talker_directory)
    studio = load(tiny_model, text_model="embedded")
    assert studio.text_info is not None
    assert studio.text_info.model_id == "embedded-rewriter"


def test_a_directory_that_is_not_there_is_an_error(tiny_model: Model, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        load(tiny_model, text_model=tmp_path / "nowhere")


def test_a_style_that_is_not_there_is_an_error_of_the_settings(tiny_model: Model, talker_directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"text.rewriter_style: style is 'cubist'; choose one of"):
        load(tiny_model, text_model=talker_directory, text_rewriter_style="cubist")


def test_a_model_that_takes_no_instructions_continues_texts_only(
    tiny_model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_talker(tmp_path / "plain", SAYS, is_instruct=False)
    with caplog.at_level(logging.WARNING):
        studio = load(tiny_model, text_model=directory)
    assert studio.texts is not None
    assert studio.rewriter is None
    assert "no chat template" in caplog.text
