"""Prompts that come together are encoded together, and what becomes of each is what it is alone, byte for byte."""

from __future__ import annotations

import pytest

from tests.device import DEVICE
from tests.runtime.conftest import LoadTiny
from tests.runtime.paged_prompts import SIXTEEN, condition, found_in, pages_of, same_bytes

TEXTS = [
    ("a red fox", "cat"),
    ("the (dog:1.3) BREAK a cat", ""),
    (SIXTEEN + "a fox", "cat"),
    (SIXTEEN + "the dog", None),
    ("the (cat:1.3)", "cat"),
    ("a fox", ""),
]


@pytest.mark.parametrize("kind", ["sdxl", "embedded"])
def test_what_a_prompt_becomes_does_not_depend_on_its_company(tiny: LoadTiny, kind: str) -> None:
    alone = []
    for text in TEXTS:
        pages = pages_of(tiny(kind), is_exact=True, num_windows=12)
        alone.append(found_in(pages, condition(pages, *text)))
    for texts, expected in ((TEXTS, alone), (TEXTS[::-1], alone[::-1])):
        pages = pages_of(tiny(kind), is_exact=True, num_windows=12)
        while pages.batches.study():
            pass
        assert pages.batches.sizes[0] == 1
        pages.precompute(texts)
        opened = [pages.pool.stats().tenants[spec.tenant].opened for spec in pages.specs]
        conditionings = [condition(pages, *text) for text in texts]
        pages.release_precomputed()
        assert all(map(same_bytes, (found_in(pages, conditioning) for conditioning in conditionings), expected))
        again = [pages.pool.stats().tenants[spec.tenant].opened for spec in pages.specs]
        if has_calls_for_several := pages.batches.sizes[-1] > 1:
            assert again[1:] == opened[1:], "no encoder ran for any of them"
        assert has_calls_for_several or DEVICE != "cpu", "on a GPU bytes may depend on how many windows share a call"
        for conditioning in conditionings:
            conditioning.close()
        pages.pool.check_integrity()
        assert pages.pool.stats().held_pages == 0
