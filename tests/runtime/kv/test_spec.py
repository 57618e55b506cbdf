"""Layers folded into pages."""

from __future__ import annotations

import pytest
import torch

from diffserve.runtime.kv import KVSpec, LayerPlace, LayerSpec, PagePlan

SD15_CHANNELS = (320, 320, 640, 640, 1280, 1280, 1280, 1280, 1280, 1280, 640, 640, 640, 320, 320, 320)
SDXL_CHANNELS = (*(640,) * 4, *(1280,) * 60, *(640,) * 6)


def unet(channels: tuple[int, ...], heads: int = 8) -> KVSpec:
    return KVSpec("unet", tuple(LayerSpec(heads, width // heads) for width in channels), torch.float16)


def bytes_of(spec: KVSpec) -> int:
    """Return the bytes of one logical page of 16 tokens in all layers."""
    return sum(map(spec.layer_bytes, range(len(spec.layers))))


def test_layers_go_in_order_into_the_first_page_with_room() -> None:
    plan = PagePlan(unet(SD15_CHANNELS), page_bytes=16 * 2 * 1280 * 2)
    unit = 16 * 2 * 320 * 2  # bytes of 16 tokens of 320 channels
    assert plan.places[:6] == (
        LayerPlace(0, 0),
        LayerPlace(0, unit),
        LayerPlace(0, 2 * unit),
        LayerPlace(1, 0),
        LayerPlace(2, 0),
        LayerPlace(3, 0),
    )
    assert plan.places[10] == LayerPlace(1, 2 * unit)
    assert plan.num_groups == 10


def test_no_two_layers_overlap_and_none_leaves_its_page() -> None:
    plan = PagePlan(unet(SD15_CHANNELS), page_bytes=100_032)
    ends: dict[int, int] = {}
    for layer, (group, offset) in sorted(enumerate(plan.places), key=lambda item: item[1]):
        assert offset == ends.get(group, 0)
        ends[group] = offset + plan.spec.layer_bytes(layer)
    assert max(ends.values()) <= plan.page_bytes
    assert sum(ends.values()) == bytes_of(plan.spec)


@pytest.mark.parametrize(("channels", "megabytes"), [(SD15_CHANNELS, 3.84), (SDXL_CHANNELS, 25.6)])
def test_a_prompt_of_77_tokens_takes_what_arithmetic_says(channels: tuple[int, ...], megabytes: float) -> None:
    assert 77 / 16 * bytes_of(unet(channels)) / 1e6 == pytest.approx(megabytes, rel=2e-3)


@pytest.mark.parametrize(("channels", "share"), [(SD15_CHANNELS, 0.97), (SDXL_CHANNELS, 1.0)])
def test_the_smallest_page_wastes_little(channels: tuple[int, ...], share: float) -> None:
    spec = unet(channels)
    plan = PagePlan(spec, PagePlan.smallest_page_bytes([spec]))
    assert plan.page_bytes == 16 * 2 * 1280 * 2
    assert share <= bytes_of(spec) / (plan.num_groups * plan.page_bytes) <= 1.0


def test_the_smallest_page_suits_the_largest_layer_of_any_tenant() -> None:
    small = KVSpec("llm", (LayerSpec(1, 3),), torch.bfloat16, page_tokens=1)
    assert PagePlan.smallest_page_bytes([small]) == 64  # 12 bytes, rounded up to a cache line
    assert PagePlan.smallest_page_bytes([small, unet((320,))]) == 16 * 2 * 320 * 2


def test_a_layer_larger_than_a_page_is_refused_with_both_sizes() -> None:
    with pytest.raises(ValueError, match=r"layer 1 needs 40960 bytes for 16 tokens and a page has 20480"):
        PagePlan(unet((320, 640)), page_bytes=20480)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tenant": ""}, "needs a name"),
        ({"layers": ()}, "at least one layer"),
        ({"dtype": torch.int8}, r"dtype is torch\.int8"),
        ({"page_tokens": 0}, "page_tokens is 0"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"tenant": "llm", "layers": (LayerSpec(1, 8),), "dtype": torch.float32}
    KVSpec(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        KVSpec(**{**good, **change})  # type: ignore[arg-type]


def test_a_layer_without_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="0 x 64"):
        LayerSpec(0, 64)


def test_digests_tell_weights_shapes_and_dtypes_apart() -> None:
    layers = (LayerSpec(2, 8),)
    specs = [
        KVSpec("llm", layers, torch.float32),
        KVSpec("text", layers, torch.float32),
        KVSpec("llm", layers, torch.float16),
        KVSpec("llm", (LayerSpec(1, 16),), torch.float32),
        KVSpec("llm", layers, torch.float32, page_tokens=8),
        KVSpec("llm", layers, torch.float32, model_digest=b"other weights"),
    ]
    assert len({spec.digest for spec in specs}) == len(specs)
    assert specs[0].digest == KVSpec("llm", layers, torch.float32).digest
