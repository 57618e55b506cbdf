"""Prompts to embeddings: what diffusers gives for plain prompts, what A1111 gives for weighted and long ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffserve.api.errors import InvalidRequest
from diffserve.runtime import Conditioning, DiffusionModel
from diffserve.runtime.text.encoding import CACHED_CHUNKS, TextReading, weigh
from tests.device import DEVICE, tolerance
from tests.runtime.conftest import LoadTiny, TinyPipeline
from tests.runtime.paged_prompts import pages_of

PROMPTS = ("a red fox on the dog", "A Cat, the CAT!  dog\n", "café 猫 🦊", "x" * 25, "<|endoftext|> cat")


def encode(model: DiffusionModel, prompt: str, negative: str = "") -> Conditioning:
    return model.text.encode(prompt, negative, width_px=64, height_px=64)


def reference_encodings(pipeline: Any, kind: str, prompt: str, negative: str | None) -> list[torch.Tensor]:
    """Diffusers' cond, uncond and for SDXL the pooled pair, each of one prompt."""
    with torch.inference_mode():
        if kind == "sdxl":
            cond, uncond, pooled, pooled_uncond = pipeline.encode_prompt(prompt, negative_prompt=negative)
            return [cond[0], uncond[0], pooled[0], pooled_uncond[0]]
        cond, uncond = pipeline.encode_prompt(prompt, DEVICE, 1, True, negative_prompt=negative)
    return [cond[0], uncond[0]]


def encodings(conditioning: Conditioning) -> list[torch.Tensor]:
    tensors = [conditioning.cond, conditioning.uncond, conditioning.pooled_cond, conditioning.pooled_uncond]
    return [tensor for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("kind", ["sd15", "sd2", "sdxl", "embedded"])
@pytest.mark.parametrize("negative", ["", "the cat"])
def test_plain_prompts_give_diffusers_embeddings_exactly(
    tiny: LoadTiny, tiny_pipeline: TinyPipeline, kind: str, negative: str
) -> None:
    for prompt in PROMPTS:
        expected = reference_encodings(tiny_pipeline(kind), kind, prompt, negative or None)
        actual = encodings(encode(tiny(kind), prompt, negative))
        assert len(actual) == len(expected)
        for mine, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["sd15", "sd2", "sdxl"])
def test_skipped_layers_are_those_of_diffusers_on_pages_too(
    tiny: LoadTiny, tiny_pipeline: TinyPipeline, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, pipeline = tiny(kind), tiny_pipeline(kind)
    if kind != "sdxl":
        monkeypatch.setitem(vars(pipeline.text_encoder), "text_model", pipeline.text_encoder)  # as it was once
    pages = pages_of(model)
    texts = []
    for skip in (1, 2):
        with torch.inference_mode():
            positional = () if kind == "sdxl" else (DEVICE, 1, True)
            expected = pipeline.encode_prompt("a red fox", *positional, clip_skip=skip - 1 or None)[0][0]
        actual = model.text.encode("a red fox", width_px=64, height_px=64, reading=TextReading(clip_skip=skip))
        torch.testing.assert_close(actual.cond, expected, rtol=0, atol=tolerance(1e-6))
        on_pages = pages.condition("a red fox", None, width_px=64, height_px=64, reading=TextReading(clip_skip=skip))
        keys = pages.gather([on_pages.cond]).layers[0].keys
        plain = model.unet.cross_attention.keys_values(expected[None]).layers[0].keys
        torch.testing.assert_close(keys, plain, rtol=0, atol=tolerance(1e-4))
        texts.append(keys)
    assert not torch.allclose(texts[0], texts[1], atol=1e-2)


def test_an_empty_negative_prompt_of_sdxl_is_all_zeros(tiny: LoadTiny) -> None:
    conditioning = encode(tiny("sdxl"), "a (cat:1.2)")
    assert not conditioning.uncond.any()
    assert conditioning.pooled_uncond is not None
    assert not conditioning.pooled_uncond.any()


def test_sdxl_gets_the_size_height_first(tiny: LoadTiny) -> None:
    conditioning = tiny("sdxl").text.encode("a cat", "", width_px=96, height_px=64)
    assert conditioning.time_ids is not None
    assert conditioning.time_ids.tolist() == [64, 96, 0, 0, 64, 96]
    assert encode(tiny("sd15"), "a cat").time_ids is None


def test_weights_multiply_token_rows_and_the_mean_is_restored(tiny: LoadTiny) -> None:
    model = tiny("sd15")
    plain, weighted = encode(model, "red fox").cond, encode(model, "(red:1.5) fox").cond
    expected = plain.clone()
    expected[1] *= 1.5
    expected *= plain.mean() / expected.mean()
    torch.testing.assert_close(weighted, expected)


def test_a_mean_of_all_but_zero_is_left_alone() -> None:
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    hidden -= hidden.mean() - 1e-5
    weighted = weigh(hidden, (1.0, 1.5, 1.0, 1.0))
    torch.testing.assert_close(weighted, hidden * torch.tensor([1.0, 1.5, 1.0, 1.0])[:, None])


def test_a_weight_of_one_changes_nothing(tiny: LoadTiny) -> None:
    assert torch.equal(encode(tiny("sd15"), "(red:1.0) fox").cond, encode(tiny("sd15"), "red fox").cond)


def test_long_prompts_are_chunks_side_by_side(tiny: LoadTiny) -> None:
    model = tiny("sd15")
    first, second = " ".join(["cat"] * 75), " ".join(["dog"] * 10)
    conditioning = encode(model, f"{first} {second}")
    assert conditioning.num_tokens == 2 * 77
    expected = torch.cat([encode(model, first).cond, encode(model, second).cond])
    assert torch.equal(conditioning.cond, expected)


def test_a_tokenizer_with_a_short_window_makes_short_chunks(tiny: LoadTiny) -> None:
    model = tiny("embedded")
    assert model.text.window_tokens == 32
    assert encode(model, "cat " * 30).num_tokens == 32
    assert encode(model, "cat " * 31).num_tokens == 64


def test_the_shorter_of_prompt_and_negative_is_padded_with_empty_chunks(tiny: LoadTiny) -> None:
    model = tiny("sd15")
    conditioning = encode(model, "a cat BREAK a dog BREAK a fox", "red")
    assert conditioning.cond.shape == conditioning.uncond.shape == (3 * 77, 64)
    empty = encode(model, "").cond
    assert torch.equal(conditioning.uncond, torch.cat([encode(model, "red").cond, empty, empty]))
    assert encode(model, "red", "a cat BREAK a dog").num_tokens == 2 * 77


def test_the_pooled_vector_is_that_of_the_first_chunk(tiny: LoadTiny) -> None:
    model = tiny("sdxl")
    long, short = encode(model, "a cat BREAK a dog"), encode(model, "a cat")
    assert long.num_tokens == 2 * short.num_tokens
    assert long.pooled_cond is not None
    assert short.pooled_cond is not None
    assert torch.equal(long.pooled_cond, short.pooled_cond)


def test_a_shared_negative_prompt_is_encoded_once(fresh_tiny: LoadTiny) -> None:
    model = fresh_tiny("sd15")
    lengths: list[int] = []
    model.text.encoders[0].network.register_forward_hook(lambda *_: lengths.append(1))
    for prompt in ("a cat", "a dog", "a cat"):
        encode(model, prompt, "red")
    assert len(lengths) == 3


def test_the_cache_forgets_the_oldest_text(fresh_tiny: LoadTiny) -> None:
    model = fresh_tiny("sd15")
    for index in range(CACHED_CHUNKS + 5):
        encode(model, f"cat {index}", "red")
    assert len(model.text._cache) == CACHED_CHUNKS
    cached_texts = {text for text, _ in model.text._cache}
    assert "cat 0" not in cached_texts
    assert {"red", f"cat {CACHED_CHUNKS + 4}"} <= cached_texts


def test_keys_tell_conditionings_apart(tiny: LoadTiny) -> None:
    model = tiny("sdxl")
    keys = [encode(model, *texts).key for texts in [("a", "b"), ("b", "a"), ("ab", ""), ("a", "b")]]
    assert len(set(keys)) == 3
    assert keys[0] == keys[3]
    assert model.text.encode("a", "b", width_px=64, height_px=72).key != keys[0]


def test_a_prompt_that_is_too_long_is_refused(tiny: LoadTiny) -> None:
    with pytest.raises(InvalidRequest, match="more than 32 chunks"):
        encode(tiny("sd15"), "cat " * 2500)


@pytest.mark.parametrize("negative", ["cat " * 2500, "(cat:200)"])
def test_an_error_of_the_negative_prompt_names_it(tiny: LoadTiny, negative: str) -> None:
    with pytest.raises(InvalidRequest, match="the negative prompt") as caught:
        encode(tiny("sd15"), "a cat", negative)
    assert caught.value.param == "negative_prompt"
