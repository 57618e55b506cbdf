"""Text engines on tiny models, each proven whole and empty after its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diffserve.api.text_types import TextConfig
from diffserve.engine.text import TextEngine
from diffserve.runtime.kv import PagePlan, PagePool
from diffserve.runtime.language import LanguageModel, load_language_model
from tests.device import DEVICE
from tests.runtime.language import tiny

Load = Callable[..., LanguageModel]
MakeEngine = Callable[..., TextEngine]


@pytest.fixture(scope="session")
def language(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """``language(kind, seed=0)``: a tiny model in float32, loaded."""
    root: Path = tmp_path_factory.mktemp("language")
    loaded: dict[tuple[str, int], LanguageModel] = {}

    def load(kind: str, seed: int = 0) -> LanguageModel:
        if (kind, seed) not in loaded:
            directory = tiny.save(root / f"{kind}-{seed}", kind, seed=seed)
            loaded[kind, seed] = load_language_model(directory, dtype="float32", device=DEVICE)
        return loaded[kind, seed]

    return load


def pages_of(*models: LanguageModel, num_pages: int = 10, page_tokens: int = 4) -> PagePool:
    """Return a pool of this many pages, each with ``page_tokens`` tokens of every layer of the first model."""
    specs = [
        model.spec(name, page_tokens=page_tokens) for model, name in zip(models, ("llm", "llm_draft"), strict=False)
    ]
    page_bytes = max(sum(spec.layer_bytes(layer) for layer in range(len(spec.layers))) for spec in specs)
    page_bytes = -(-page_bytes // 64) * 64
    pool = PagePool(num_pages, page_bytes, device=models[0].device)
    pool.arena.data.fill_(255)  # every float is NaN until it is written
    for spec in specs:
        assert pool.register(spec) == PagePlan(spec, page_bytes)
    return pool


@pytest.fixture
def make_engine(language: Load) -> Iterator[MakeEngine]:
    """``make_engine(kind, num_pages=..., draft_seed=..., **config)``: afterwards all pages must be back."""
    engines: list[TextEngine] = []

    def make(
        kind: str = "llama",
        *,
        num_pages: int = 400,
        draft_seed: int | None = None,
        clock: Any = None,
        reads_late: bool | None = None,
        **config: Any,
    ) -> TextEngine:
        draft = None if draft_seed is None else language(kind, draft_seed)
        model = language(kind)
        pool = pages_of(*([model] if draft is None else [model, draft]), num_pages=num_pages)
        extra = {} if clock is None else {"clock": clock}
        settings = TextConfig(**{"num_draft_tokens": 0, "page_tokens": 4, **config})
        engine = TextEngine(model, pool, settings, draft_model=draft, reads_late=reads_late, **extra)
        engines.append(engine)
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_integrity()
        if not engine.has_work:
            assert engine.pool.stats().held_pages == 0
