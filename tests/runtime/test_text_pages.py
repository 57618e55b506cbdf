"""CLIP over pages: transformers' numbers from any token on, and the same bytes however much was there already."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffserve.runtime import DiffusionModel
from diffserve.runtime.kv import PagePool, PoolBusy
from diffserve.runtime.text.paged_encoder import PagedTextEncoder, segments, text_spec
from tests.device import tolerance
from tests.runtime.conftest import LoadTiny

KINDS = ("sd15", "sd2", "sdxl", "embedded")
WORDS = "cat dog " * 15 + "cat on the red fox"  # 32 tokens with the start mark, and a few
OTHER = "cat dog " * 15 + "cat, cat"


def paged(model: DiffusionModel, index: int = -1, *, is_exact: bool = False, num_texts: int = 4) -> PagedTextEncoder:
    """One text encoder of ``model`` on a pool of its own that holds ``num_texts`` windows."""
    network = model.text.encoders[index].network
    spec = text_spec(network, tenant="text", dtype=torch.float32, identity=b"a test")
    some = PagePool.for_specs(1 << 20, [spec], device=model.device)
    pool = PagePool(
        some.num_pages_for("text", model.text.window_tokens) * num_texts, some.page_bytes, device=model.device
    )
    return PagedTextEncoder(pool, network, spec, stops_early=model.text.is_sdxl, is_exact=is_exact)


def ids_of(model: DiffusionModel, text: str, index: int = -1) -> tuple[int, ...]:
    return model.text.windows(text)[0].chunks[index].ids


def reference_hidden(network: Any, ids: tuple[int, ...], *, is_pair: bool) -> torch.Tensor:
    with torch.inference_mode():
        output = network(torch.tensor([ids], device=network.device), output_hidden_states=True)
    state: torch.Tensor = output.hidden_states[-2] if is_pair else output.last_hidden_state
    return state[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_exact", [False, True], ids=["free", "exact"])
def test_hidden_states_are_those_of_transformers(tiny: LoadTiny, kind: str, is_exact: bool) -> None:
    model = tiny(kind)
    for index, encoder in enumerate(model.text.encoders):
        paged_encoder = paged(model, index, is_exact=is_exact)
        ids = ids_of(model, WORDS, index)
        actual = paged_encoder.encode(ids, first=0).hidden
        expected = reference_hidden(encoder.network, ids, is_pair=model.text.is_sdxl)
        largest = float(expected.abs().max())  # SDXL's states are not normalized
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance(1e-5) * max(1.0, largest))


@pytest.mark.parametrize("first", [0, 5, 16, 31, 32])
@pytest.mark.parametrize("is_exact", [False, True], ids=["free", "exact"])
def test_the_rest_of_a_text_is_that_of_the_whole(tiny: LoadTiny, first: int, is_exact: bool) -> None:
    model = tiny("sd2")
    ids, other = ids_of(model, WORDS), ids_of(model, OTHER)
    paged_encoder = paged(model, is_exact=is_exact)
    paged_encoder.encode(other, first=0)
    actual = paged_encoder.encode(ids, first=first).hidden
    assert paged_encoder.pool.stats().tenants["text"].found_tokens == first // 16 * 16
    torch.testing.assert_close(
        actual, reference_hidden(paged_encoder.network, ids, is_pair=False)[first:], rtol=0, atol=tolerance(1e-5)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_exact_hidden_states_are_the_same_bytes_after_a_hit_as_after_a_miss(tiny: LoadTiny, kind: str) -> None:
    model = tiny(kind)
    ids, other = ids_of(model, WORDS), ids_of(model, OTHER)
    cold = paged(model, is_exact=True).encode(ids, first=0)
    warm = paged(model, is_exact=True)
    warm.encode(other, first=0)
    actual = warm.encode(ids, first=16)
    assert warm.pool.stats().tenants["text"].found_tokens == 16
    assert torch.equal(actual.hidden, cold.hidden[16:])
    assert torch.equal(actual.last, cold.last[16:])


def test_segments_are_cut_by_place_and_not_by_what_is_missing() -> None:
    assert segments(0, 77, 16, is_exact=True) == [(0, 16), (16, 32), (32, 48), (48, 64), (64, 77)]
    assert segments(48, 77, 16, is_exact=True) == [(48, 64), (64, 77)]
    assert segments(16, 77, 16, is_exact=False) == [(16, 77)]
    assert segments(77, 77, 16, is_exact=False) == segments(77, 77, 16, is_exact=True) == []


def test_the_pooled_token_is_the_first_end_mark_and_in_old_configurations_the_largest_id(
    fresh_tiny: LoadTiny,
) -> None:
    model = fresh_tiny("sdxl")
    encoder, network = paged(model), model.text.encoders[-1].network
    for text in ("a red fox", "", WORDS):
        ids = ids_of(model, text)
        for end in (network.config.eos_token_id, 2):
            network.config.eos_token_id = network.text_model.eos_token_id = end
            with torch.inference_mode():
                expected = network(torch.tensor([ids], device=network.device)).text_embeds[0]
            place = encoder.place_of_end(ids)
            actual = encoder.pooled(encoder.encode(ids, first=place).last[0])
            torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance(1e-5))
        network.config.eos_token_id = network.text_model.eos_token_id = ids[place]


def test_encoding_holds_pages_only_while_it_lasts_and_says_when_there_are_none(tiny: LoadTiny) -> None:
    model = tiny("sd15")
    encoder = paged(model, num_texts=1)
    ids = ids_of(model, WORDS)
    encoder.encode(ids, first=0)
    assert encoder.pool.stats().held_pages == 0
    table, _ = encoder.pool.open("text", reserve=16)
    with pytest.raises(PoolBusy):
        encoder.encode(ids_of(model, "a fox"), first=0)
    encoder.pool.close(table)
    encoder.encode(ids_of(model, "a fox"), first=0)
    encoder.pool.check_integrity()
