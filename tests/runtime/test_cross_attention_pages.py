"""The UNet's cross-attention over pages: diffusers' numbers, shared beginnings, and bytes that no history changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diffserve.api.types import DiffusionParams, GenerationRequest, ImageResult
from diffserve.engine import Engine
from diffserve.runtime import UNetRunner, load_model
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.runtime.text.encoding import Conditioning
from diffserve.runtime.text.prompt_pages import PagedConditioning
from diffserve.runtime.unet.layers import use_steady_layers
from diffserve.settings.config import EngineConfig
from tests.device import DEVICE, tolerance
from tests.runtime.conftest import LoadTiny, TinyPipeline
from tests.runtime.paged_prompts import SIXTEEN, condition, embed, found_in, pages_of, same_bytes
from tests.runtime.test_precision import UNET_TOLERANCE

KINDS = ("sd15", "sd2", "sdxl", "inpaint9", "embedded")
NARROW: dict[str, dict[str, Any]] = {  # the published depths and heads, on narrow channels
    "sd15": {
        "block_out_channels": (32, 64, 128, 128),
        "layers_per_block": 2,
        "cross_attention_dim": 64,
        "attention_head_dim": 8,
    },
    "sd2": {
        "block_out_channels": (64, 128, 256, 256),
        "layers_per_block": 2,
        "cross_attention_dim": 64,
        "attention_head_dim": (1, 2, 4, 4),
        "use_linear_projection": True,
    },
    "sdxl": {
        "block_out_channels": (32, 64, 128),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "layers_per_block": 2,
        "transformer_layers_per_block": (1, 2, 10),
        "cross_attention_dim": 128,
        "attention_head_dim": (1, 1, 2),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 32 + 6 * 8,
    },
}


def rows_for(unet: UNetRunner, conditioning: Conditioning | PagedConditioning) -> dict[str, Any]:
    """Return the inputs of a call with two rows, cond and uncond of one image, except the texts."""
    rng = torch.Generator().manual_seed(0)
    rows: dict[str, Any] = {
        "model_input": torch.randn((2, unet.latent_channels, 8, 8), generator=rng).to(DEVICE),
        "timesteps": torch.tensor([10.0, 700.0], device=DEVICE),
    }
    if unet.extra_channels:
        rows["extra"] = torch.randn((2, unet.extra_channels, 8, 8), generator=rng).to(DEVICE)
    if conditioning.time_ids is not None:
        assert conditioning.pooled_cond is not None
        assert conditioning.pooled_uncond is not None
        rows["pooled"] = torch.stack([conditioning.pooled_cond, conditioning.pooled_uncond])
        rows["time_ids"] = torch.stack([conditioning.time_ids] * 2)
    return rows


def reference_output(network: Any, rows: dict[str, Any], texts: torch.Tensor) -> torch.Tensor:
    """Diffusers' own answer to the same call."""
    added = {"text_embeds": rows["pooled"], "time_ids": rows["time_ids"]} if "pooled" in rows else None
    sample = torch.cat([rows["model_input"], rows["extra"]], dim=1) if "extra" in rows else rows["model_input"]
    with torch.inference_mode():
        output: torch.Tensor = network(
            sample, rows["timesteps"], encoder_hidden_states=texts, added_cond_kwargs=added
        ).sample
    return output


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["a red fox", "a (red:1.4) [fox] BREAK the cat"], ids=["plain", "weighted, long"])
def test_the_unet_over_pages_equals_diffusers(
    tiny: LoadTiny, tiny_pipeline: TinyPipeline, kind: str, prompt: str
) -> None:
    model = tiny(kind)
    pages = pages_of(model)
    conditioning, expected = condition(pages, prompt), embed(model, prompt)
    rows = rows_for(model.unet, conditioning)
    actual = model.unet.predict(contexts=pages.gather([conditioning.cond, conditioning.uncond]), **rows)
    texts = torch.stack([expected.cond, expected.uncond])
    judge = reference_output(tiny_pipeline(kind).unet, rows_for(model.unet, expected), texts)
    torch.testing.assert_close(actual, judge, rtol=0, atol=tolerance(1e-5))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_layers"), [("sd15", 16), ("sd2", 16), ("sdxl", 70)])
def test_the_published_depths_and_heads_equal_diffusers(tiny: LoadTiny, kind: str, num_layers: int) -> None:
    torch.manual_seed(0)
    network = import_quietly("diffusers", "UNet2DConditionModel")(sample_size=8, **NARROW[kind]).eval().to(DEVICE)
    model = tiny(kind)
    expected = embed(model, "a red fox")
    texts = torch.stack([expected.cond, expected.uncond])
    judge = reference_output(network, rows_for(model.unet, expected), texts)  # before its processors are replaced
    pages = pages_of(model, unet=UNetRunner(network, device=model.device, dtype=torch.float32))
    conditioning = condition(pages, "a red fox")
    assert len(pages.specs.unet.layers) == num_layers
    actual = pages.unet.predict(
        contexts=pages.gather([conditioning.cond, conditioning.uncond]), **rows_for(model.unet, conditioning)
    )
    torch.testing.assert_close(actual, judge, rtol=0, atol=tolerance(1e-5))


def test_embeddings_still_go_diffusers_way_bit_for_bit(fresh_tiny: LoadTiny, tiny_model: Callable[[str], Path]) -> None:
    model = fresh_tiny("sd15")
    assert len(model.unet.cross_attention.layers) == 4
    conditioning = embed(model, "a red fox")
    rows, texts = rows_for(model.unet, conditioning), torch.stack([conditioning.cond, conditioning.uncond])
    network = (
        import_quietly("diffusers", "UNet2DConditionModel")
        .from_pretrained(tiny_model("sd15") / "unet")
        .eval()
        .to(DEVICE)
    )
    if DEVICE == "cpu":
        use_steady_layers(network, torch.float32)
    assert torch.equal(model.unet.predict(contexts=texts, **rows), reference_output(network, rows, texts))


def test_rows_can_be_chosen_from_keys_and_values(tiny: LoadTiny) -> None:
    unet = tiny("sd15").unet
    keys_values = unet.cross_attention.keys_values(
        torch.randn(3, 77, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    )
    selection = keys_values.select(torch.tensor([2, 0, 2], device=DEVICE))
    for new, old in zip(selection.layers, keys_values.layers, strict=True):
        assert torch.equal(new.keys, old.keys[[2, 0, 2]])
        assert torch.equal(new.values, old.values[[2, 0, 2]])
    assert selection.num_bytes == keys_values.num_bytes


@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_rows_of_different_lengths_share_a_call_and_each_gets_its_own_result(tiny: LoadTiny, kind: str) -> None:
    model = tiny(kind)
    pages = pages_of(model)
    conditionings = [condition(pages, prompt, None) for prompt in ("a dog", "a cat BREAK a dog BREAK the red fox")]
    rows = rows_for(model.unet, condition(pages, "a dog"))
    together = model.unet.predict(contexts=pages.gather([conditioning.cond for conditioning in conditionings]), **rows)
    for index, conditioning in enumerate(conditionings):
        contexts = pages.gather([conditioning.cond] * 2)
        assert contexts.mask is None
        alone = model.unet.predict(contexts=contexts, **rows)
        torch.testing.assert_close(together[index], alone[index], rtol=0, atol=tolerance(1e-5))
    mixed = pages.gather([conditioning.cond for conditioning in conditionings]).select(
        torch.tensor([1, 0], device=DEVICE)
    )
    assert mixed.mask is not None
    assert mixed.mask.sum(dim=-1).flatten().tolist() == [3 * 77, 77]


def test_two_prompts_with_sixteen_tokens_in_common_share_those_pages_in_all_layers(tiny: LoadTiny) -> None:
    pages = pages_of(tiny("sd15"))
    anna = condition(pages, SIXTEEN + "the dog", None)
    ben = condition(pages, SIXTEEN + "the fox", None)
    assert len(pages.specs.unet.layers) == 4
    assert anna.cond[0].pages == ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11), (12, 13, 14))  # 3 pages hold 4 layers
    assert ben.cond[0].pages == ((0, 1, 2), (27, 28, 29), (30, 31, 32), (33, 34, 35), (36, 37, 38))
    for page, other in zip(found_in(pages, anna), found_in(pages, ben), strict=True):
        assert torch.equal(page[:, :16], other[:, :16])
        assert not torch.equal(page[:, 16:], other[:, 16:])


@pytest.mark.parametrize(("kind", "dtype"), [("sd15", "float32"), ("sdxl", "float32"), ("sd15", "bfloat16")])
@pytest.mark.parametrize("prompt", [SIXTEEN + "the red fox", SIXTEEN + "the (red:1.3) fox"], ids=["plain", "weighted"])
def test_exact_pages_are_the_same_bytes_whatever_was_cached(
    tiny_model: Callable[[str], Path], kind: str, dtype: str, prompt: str
) -> None:
    model = load_model(tiny_model(kind), dtype=dtype, device=DEVICE)
    alone = pages_of(model, is_exact=True)
    expected = found_in(alone, condition(alone, prompt))

    pages = pages_of(model, is_exact=True)
    condition(pages, SIXTEEN + "dog " * 16 + "cat", None).close()
    conditioning = condition(pages, prompt)
    assert same_bytes(found_in(pages, conditioning), expected)  # after a prompt with the same beginning
    conditioning.close()
    for spec in pages.specs.encoders:
        pages.pool.forget(spec.tenant)
    assert same_bytes(found_in(pages, condition(pages, prompt)), expected)  # the encoders' pages are gone

    condition(pages, SIXTEEN + "dog", None)
    pages.pool.forget(pages.specs.unet.tenant)
    assert same_bytes(found_in(pages, condition(pages, prompt)), expected)  # only the encoders' are left


def test_exact_pages_are_made_by_products_of_the_same_shapes_after_a_hit_as_after_a_miss(fresh_tiny: LoadTiny) -> None:
    model = fresh_tiny("sd15")
    shapes: dict[int, list[tuple[int, ...]]] = {}

    def note(part: torch.nn.Module, args: tuple[torch.Tensor, ...], _output: torch.Tensor) -> None:
        shapes.setdefault(id(part), []).append(tuple(args[0].shape))

    for layer in (model.text.encoders[0].network, *model.unet.cross_attention.modules):
        for part in layer.modules():
            if isinstance(part, torch.nn.Linear):
                part.register_forward_hook(note)
    condition(pages_of(model, is_exact=True), SIXTEEN + "the fox", None)
    cold, shapes = shapes, {}
    pages = pages_of(model, is_exact=True)
    condition(pages, SIXTEEN + "dog", None)
    cold_too, shapes = shapes, {}
    condition(pages, SIXTEEN + "the fox", None)
    assert list(cold.values()) == list(cold_too.values())
    assert shapes == {key: shape[1:] for key, shape in cold.items()}
    assert {len(shape) for shape in cold.values()} == {5}


@pytest.mark.parametrize("prompt", ["the red fox", "the (red:1.3) fox"])
def test_exact_pages_are_the_same_bytes_when_only_their_beginning_is_left(tiny: LoadTiny, prompt: str) -> None:
    pages = pages_of(tiny("sd15"), is_exact=True)
    conditioning = condition(pages, prompt, None)
    expected = found_in(pages, conditioning)
    conditioning.close()
    [window] = pages.text.windows(prompt)
    tenant, pool = pages.specs.unet.tenant, pages.pool
    stats = pool.stats()
    other_pages = stats.free_pages + stats.tenants[pages.specs.encoders[0].tenant].idle_pages
    stranger, _ = pool.open(
        tenant, reserve=16 * (other_pages // 3 + 2)
    )  # the prompt's last two logical pages, of 3 pages, go too
    pool.close(stranger)
    assert pool.num_cached(tenant, window.token_ids, window.salt) == 48
    assert same_bytes(found_in(pages, condition(pages, prompt, None)), expected)


def test_exact_pages_are_the_same_bytes_after_their_tail_was_evicted(tiny: LoadTiny) -> None:
    alone = pages_of(tiny("sdxl"), is_exact=True)
    expected = found_in(alone, condition(alone, "the (red:1.3) fox", "cat"))
    pages = pages_of(tiny("sdxl"), is_exact=True, num_windows=3)
    outputs = []
    for number in range(8):
        condition(pages, f"{number} dog", "dog").close()
        conditioning = condition(pages, "the (red:1.3) fox", "cat")
        outputs.append(found_in(pages, conditioning))
        conditioning.close()
    assert pages.pool.stats().tenants[pages.specs.unet.tenant].evicted_pages > 0
    assert all(same_bytes(output, expected) for output in outputs)


def test_a_unet_with_other_cross_attention_has_no_pages(tiny: LoadTiny) -> None:
    blocks = {
        "down_block_types": ("SimpleCrossAttnDownBlock2D",),
        "up_block_types": ("SimpleCrossAttnUpBlock2D",),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    }
    network = import_quietly("diffusers", "UNet2DConditionModel")(
        block_out_channels=(32,), layers_per_block=1, cross_attention_dim=64, attention_head_dim=8, **blocks
    ).to(DEVICE)
    model = tiny("sd15")
    assert model.unet.unpaged_reason is None
    unet = UNetRunner(network, device=torch.device(DEVICE), dtype=torch.float32)
    assert "added_kv_proj_dim" in str(unet.unpaged_reason)
    engine = Engine(replace(model, unet=unet), EngineConfig(max_rows=2, cache_dir=""))
    [result] = engine.generate(GenerationRequest(prompt="a fox", diffusion=DiffusionParams(num_steps=2)))
    assert isinstance(result, ImageResult)
    assert engine.pool is None


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_keys_and_values_are_made_with_the_weights_as_they_are(
    tiny_model: Callable[[str], Path], tiny: LoadTiny, dtype: str
) -> None:
    model = load_model(tiny_model("sd15"), dtype=dtype, device=DEVICE)
    pages, expected = pages_of(model), embed(model, "a red fox")
    conditioning = condition(pages, "a red fox")
    assert pages.specs.unet.dtype == model.dtype
    rows, texts = rows_for(model.unet, conditioning), torch.stack([expected.cond, expected.uncond])
    actual = model.unet.predict(contexts=pages.gather([conditioning.cond, conditioning.uncond]), **rows)
    plain = model.unet.predict(contexts=texts, **rows)
    error = float((actual - plain).norm() / plain.norm())
    assert error <= UNET_TOLERANCE[dtype] / 10
