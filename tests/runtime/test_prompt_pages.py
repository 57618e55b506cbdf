"""Prompts as pages: sharing, computation, waiting for room, and release of all pages."""

from __future__ import annotations

import pytest
import torch

from diffserve.api.errors import ConfigError, InvalidRequest
from diffserve.runtime.kv import PoolBusy
from tests.runtime.conftest import LoadTiny
from tests.runtime.paged_prompts import SIXTEEN, condition, embed, found_in, pages_of, same_bytes


def test_a_prompt_that_begins_like_an_earlier_one_computes_only_the_rest(tiny: LoadTiny) -> None:
    pages = pages_of(tiny("sdxl"))
    condition(pages, SIXTEEN + "cat " * 16 + "the dog", None).close()
    before = pages.pool.stats().tenants
    condition(pages, SIXTEEN + "cat " * 16 + "the fox", None).close()
    after = pages.pool.stats().tenants
    assert len(after) == 3
    for name, stats in after.items():
        assert stats.found_tokens - before[name].found_tokens == 32
        assert stats.asked_tokens - before[name].asked_tokens == 77


def test_a_repeated_prompt_runs_no_encoder_and_takes_no_page(tiny: LoadTiny) -> None:
    pages = pages_of(tiny("sdxl"))
    first = condition(pages, "a red fox", "cat")
    opened = [pages.pool.stats().tenants[spec.tenant].opened for spec in pages.specs.encoders]
    held_pages = pages.pool.stats().held_pages
    again = [condition(pages, "a red fox", "cat") for _ in range(8)]
    assert [pages.pool.stats().tenants[spec.tenant].opened for spec in pages.specs.encoders] == opened
    assert pages.pool.stats().held_pages == held_pages
    assert {conditioning.cond[0].pages for conditioning in again} == {first.cond[0].pages}
    assert same_bytes(found_in(pages, again[-1]), found_in(pages, first))


def test_the_negative_prompt_is_stored_once_for_thirty_two_prompts(tiny: LoadTiny) -> None:
    pages = pages_of(tiny("sd15"), num_windows=40)
    conditionings = [condition(pages, f"{number} cat", "red, the dog") for number in range(32)]
    assert len({conditioning.uncond[0].pages for conditioning in conditionings}) == 1
    assert len({conditioning.cond[0].pages for conditioning in conditionings}) == 32
    assert pages.pool.stats().held_pages == 33 * pages.pool.num_pages_for(pages.specs.unet.tenant, 77)


def test_the_padding_windows_of_a_long_prompt_are_those_of_the_empty_prompt(tiny: LoadTiny) -> None:
    pages = pages_of(tiny("sd15"))
    conditioning = condition(pages, "a cat BREAK a dog BREAK a cat", "")
    empty = condition(pages, "", None)
    assert conditioning.num_tokens == 3 * 77
    assert {table.pages for table in conditioning.uncond} == {empty.cond[0].pages}
    assert conditioning.cond[0].pages == conditioning.cond[2].pages != conditioning.cond[1].pages


def test_the_zeros_of_sdxl_are_stored_once_and_are_zeros(tiny: LoadTiny) -> None:
    pages = pages_of(tiny("sdxl"))
    conditionings = [condition(pages, prompt, "") for prompt in ("a cat", "a dog BREAK a fox")]
    assert {table.pages for conditioning in conditionings for table in conditioning.uncond} == {
        conditionings[0].uncond[0].pages
    }
    assert not any(tensor.any() for pair in pages.gather([conditionings[1].uncond]).layers for tensor in pair)
    assert conditionings[0].pooled_uncond is not None
    assert not conditionings[0].pooled_uncond.any()
    assert condition(pages, "", None).cond[0].pages != conditionings[0].uncond[0].pages


def test_weighted_prompts_share_whole_or_not_at_all(tiny: LoadTiny) -> None:
    pages = pages_of(tiny("sd15"))
    plain = condition(pages, SIXTEEN + "the fox", None).cond[0].pages
    weighted = condition(pages, SIXTEEN + "the (fox:1.3)", None).cond[0].pages
    heavier = condition(pages, SIXTEEN + "the (fox:1.4)", None).cond[0].pages
    other = condition(pages, SIXTEEN + "the (dog:1.3)", None).cond[0].pages
    assert condition(pages, SIXTEEN + "the (fox:1.3)", None).cond[0].pages == weighted
    assert len({*plain, *weighted, *heavier, *other}) == 4 * 5


@pytest.mark.parametrize("is_exact", [False, True])
def test_pooled_vectors_are_those_of_diffusers_and_found_again(tiny: LoadTiny, is_exact: bool) -> None:
    model = tiny("sdxl")
    pages, expected = pages_of(model, is_exact=is_exact), embed(model, "a red fox", "the cat")
    conditioning = condition(pages, "a red fox", "the cat")
    for mine, other in (
        (conditioning.pooled_cond, expected.pooled_cond),
        (conditioning.pooled_uncond, expected.pooled_uncond),
    ):
        assert mine is not None
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
    pages._pooled.clear()  # as when a thousand other prompts came between
    again = condition(pages, "a red fox", "the cat")
    assert again.pooled_cond is not None
    torch.testing.assert_close(again.pooled_cond, conditioning.pooled_cond, rtol=0, atol=0.0 if is_exact else 1e-6)
    assert again.time_ids is not None
    assert again.time_ids.tolist() == [64, 64, 0, 0, 64, 64]


def test_a_request_without_pages_waits_and_holds_none(tiny: LoadTiny) -> None:
    pages = pages_of(tiny("sd15"), num_windows=3)
    first = condition(pages, "a cat", "red")
    held_pages = pages.pool.stats().held_pages
    with pytest.raises(PoolBusy):
        condition(pages, "a dog BREAK a fox", None)
    assert (pages.num_open, pages.pool.stats().held_pages) == (1, held_pages)
    first.close()
    first.close()
    assert (pages.num_open, pages.pool.stats().held_pages) == (0, 0)
    assert condition(pages, "a dog BREAK a fox", None).num_tokens == 2 * 77
    pages.pool.check_integrity()


def test_a_prompt_that_the_pool_can_never_hold_is_refused_with_the_size_it_needs(tiny: LoadTiny) -> None:
    pages = pages_of(tiny("sd15"), num_windows=3)
    long = "a cat BREAK a dog BREAK a fox"
    with pytest.raises(
        InvalidRequest, match=r"take 105 pages and the whole pool has 60: .*kv_pool_bytes to 860160"
    ) as refused:
        condition(pages, long, "red BREAK cat")
    assert (refused.value.code, refused.value.param) == ("pool_too_small", "prompt")
    assert condition(pages, long, None).num_tokens == 3 * 77


def test_a_pool_without_room_for_one_guided_image_is_refused_at_once(tiny: LoadTiny) -> None:
    with pytest.raises(ConfigError, match=r"takes 368640: set engine\.kv_pool_bytes"):
        pages_of(tiny("sd15"), num_windows=1)


def test_a_failure_in_the_middle_gives_the_pages_back(fresh_tiny: LoadTiny) -> None:
    model = fresh_tiny("sd15")
    pages = pages_of(model)

    def choke(*_: object) -> None:
        raise RuntimeError("the device choked")

    handle = model.unet.cross_attention.modules[2].to_v.register_forward_hook(choke)
    with pytest.raises(RuntimeError, match="choked"):
        condition(pages, "a cat")
    handle.remove()
    assert pages.pool.stats().held_pages == 0
    pages.pool.check_integrity()
    conditioning, expected = condition(pages, "a cat"), embed(model, "a cat")
    again = model.unet.cross_attention.keys_values(torch.stack([expected.cond, expected.uncond]))
    actual = pages.gather([conditioning.cond, conditioning.uncond])
    torch.testing.assert_close(actual.layers[2].values, again.layers[2].values, rtol=0, atol=1e-5)
