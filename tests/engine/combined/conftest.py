"""Studios on tiny models and one page pool, each proven whole and empty after its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diffserve.api.text_types import TextConfig
from diffserve.engine.combined_engine import CombinedEngine
from diffserve.engine.image.compiled_groups import is_deterministic
from diffserve.engine.image.engine import Engine
from diffserve.engine.rewriter import Rewriter
from diffserve.engine.text import TextEngine
from diffserve.rewriting import TextWindow
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.kv import PagePool
from diffserve.runtime.language import LanguageModel, load_language_model
from diffserve.runtime.text.conditioning import image_specs
from diffserve.settings.config import EngineConfig
from tests.device import DEVICE
from tests.engine.combined.talker import save_talker

SAYS = "fox"
"""What every wish is rewritten to."""

MakeStudio = Callable[..., CombinedEngine]


@pytest.fixture(scope="session")
def talker_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a language model that always answers "fox"."""
    return save_talker(tmp_path_factory.mktemp("talker") / "talker", SAYS)


@pytest.fixture(scope="session")
def talker(talker_directory: Path) -> LanguageModel:
    return load_language_model(talker_directory, dtype="float32", device=DEVICE)


@pytest.fixture(scope="session")
def painter(tiny_model: Callable[[str], Path]) -> DiffusionModel:
    return load_model(tiny_model("sd15"), dtype="float32", device=DEVICE)


@pytest.fixture
def make_studio(painter: DiffusionModel, talker: LanguageModel) -> Iterator[MakeStudio]:
    """``make_studio(has_texts=True, pool_bytes=..., time_share=..., clock=..., text={}, **engine)``."""
    studios: list[CombinedEngine] = []

    def make(
        *,
        has_texts: bool = True,
        pool_bytes: int = 1 << 22,
        time_share: float = 0.25,
        clock: Any = None,
        text: dict[str, Any] | None = None,
        **engine: Any,
    ) -> CombinedEngine:
        config = EngineConfig(max_rows=8, **engine)
        timed = {} if clock is None else {"clock": clock}
        if not has_texts:
            studios.append(CombinedEngine(Engine(painter, config), time_share=time_share, **timed))
            return studios[-1]
        specs = [*image_specs(painter, is_exact=is_deterministic(painter, config)), talker.spec("llm")]
        pool = PagePool.for_specs(pool_bytes, specs, device=DEVICE)
        texts = TextEngine(talker, pool, TextConfig(**{"num_draft_tokens": 0, **(text or {})}), **timed)
        rewriter = Rewriter(texts, style="tags", window=TextWindow.of(painter.text))
        studios.append(
            CombinedEngine(Engine(painter, config, pool=pool), texts, rewriter, time_share=time_share, **timed)
        )
        return studios[-1]

    yield make
    for studio in studios:
        studio.check_integrity()
        assert not studio.num_live
        assert not studio.has_work
        if studio.pool is not None:
            assert studio.pool.stats().held_pages == 0
