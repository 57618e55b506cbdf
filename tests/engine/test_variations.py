"""Pictures varied by another seed: the noise is A1111's, a neighbour changes none, and each can be painted alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from diffserve.api.errors import InvalidRequest
from diffserve.api.fields import MAX_SEED
from diffserve.api.types import DiffusionParams, GenerationRequest, ImageResult, Picture
from diffserve.engine.image.state import slerp
from diffserve.media.infotext import parse_infotext, write_infotext
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import PIPELINES, image_request, load_pipeline, pipeline_latents

TOLERANCE = 1e-3
SHAPE = (4, 8, 8)


def noise(seed: int) -> torch.Tensor:
    return torch.randn((1, *SHAPE), generator=torch.Generator().manual_seed(seed))[0]


def varied(seed: int, variation_seed: int | None, share: float, **fields: Any) -> GenerationRequest:
    fields = {"num_steps": 3, "sampler": "ddim", **fields}
    sampler = fields.pop("sampler")
    return image_request("sd15", sampler, seed, variation_seed=variation_seed, variation_strength=share, **fields)


def seeds_of(result: ImageResult) -> tuple[int, int | None]:
    return result.seed, result.variation_seed


def test_noise_is_turned_column_by_column_on_the_arc_between_two() -> None:
    start, end = noise(1), noise(2)
    turned = slerp(0.3, start, end)
    for channel, column in ((0, 0), (3, 5)):
        first, other = start[channel, :, column], end[channel, :, column]
        angle = math.acos(float(first @ other / (first.norm() * other.norm())))
        expected = (math.sin(0.7 * angle) * first + math.sin(0.3 * angle) * other) / math.sin(angle)
        assert torch.allclose(turned[channel, :, column], expected, atol=1e-5)
    assert torch.equal(slerp(1.0, start, end), end)
    assert torch.equal(slerp(0.0, start, end), start)
    assert torch.allclose(slerp(0.3, start, start), start, atol=1e-6)
    assert torch.allclose(slerp(0.5, start, -start), torch.zeros(SHAPE), atol=1e-6), "no number is lost"


def test_a_varied_picture_is_that_of_diffusers_from_the_same_noise(
    make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    request = varied(3, 11, 0.4, num_steps=6)
    [result] = make_engine().generate(request)
    pipeline = load_pipeline(PIPELINES["sd15"], tiny_model("sd15"))
    reference = pipeline_latents(pipeline, request, "sd15", latents=slerp(0.4, noise(3), noise(11))[None])
    assert result.latents is not None
    assert np.abs(result.latents.array - reference).max() < TOLERANCE


@pytest.mark.parametrize(("sampler", "source"), [("ddim", "device"), ("dpmpp_2m_sde", "cpu"), ("euler_a", "device")])
def test_images_of_a_request_share_their_seed_and_each_can_be_painted_alone(
    make_engine: MakeEngine, sampler: str, source: str
) -> None:
    """Generate them in a batch and from the text in their files; strength 1 gives the other seed's image."""
    engine = make_engine(max_rows=8)
    how: dict[str, Any] = {"sampler": sampler, "noise_source": source}
    request = varied(7, 20, 0.25, num_images=2, **how)
    full_result, plain = varied(7, 21, 1.0, **how), varied(21, None, 0.0, **how)
    *together, all_the_way, other = engine.generate([request, full_result, plain])
    assert [seeds_of(result) for result in together] == [(7, 20), (7, 21)]
    assert all_the_way.picture == other.picture
    assert seeds_of(other) == (21, None)
    assert together[0].picture != together[1].picture
    for result in together:
        fields = parse_infotext(write_infotext(result, width_px=64, height_px=64)).fields
        again = int(fields["Variation seed"]), float(fields["Variation seed strength"])
        [alone] = engine.generate(varied(int(fields["Seed"]), *again, **how))
        assert alone.picture == result.picture


def test_a_picture_that_begins_from_another_is_varied_too(make_engine: MakeEngine) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    init_fields: dict[str, Any] = {"init_image": Picture.from_array(pixels), "strength": 0.6, "num_steps": 4}
    engine = make_engine()
    plain, *other_results = (
        engine.generate(varied(7, seed, share, **init_fields))[0] for seed, share in ((None, 0.0), (20, 0.3), (20, 0.3))
    )
    assert other_results[0].picture == other_results[1].picture != plain.picture
    [same] = engine.generate(varied(7, 7, 0.3, **init_fields))
    assert same.latents is not None
    assert plain.latents is not None
    assert np.abs(same.latents.array - plain.latents.array).max() < 1e-4, "its own noise, turned towards itself"
    mask = {"mask_image": Picture.from_array(pixels[..., 0] // 128 * 255)}
    inside, outside = (engine.generate(varied(7, 20, share, **init_fields, **mask))[0] for share in (0.3, 0.0))
    assert inside.picture != outside.picture


def test_an_omitted_variation_seed_is_drawn_and_reported(make_engine: MakeEngine) -> None:
    engine = make_engine()
    drawn = [engine.generate(varied(7, None, 0.3))[0] for _ in range(2)]
    assert drawn[0].variation_seed != drawn[1].variation_seed
    request = varied(7, None, 0.3)
    again = [engine.generate(request)[0] for _ in range(2)]
    assert again[0].picture == again[1].picture, "who begins the same request anew elsewhere paints the same"
    assert drawn[0].picture != drawn[1].picture
    assert engine.generate(varied(7, drawn[0].variation_seed, 0.3))[0].picture == drawn[0].picture
    [plain] = engine.generate(varied(7, 4, 0.0))
    assert "variation_seed has no effect without variation_strength." in plain.warnings
    assert seeds_of(plain) == (7, None)
    [far] = engine.generate(varied(7, 2**32 + 1, 0.3))
    assert f"seeds of {2**32} or more repeat smaller ones: {2**32 + 1} gives the same image as 1." in far.warnings


def test_known_pictures_are_known_by_both_seeds(make_engine: MakeEngine) -> None:
    engine = make_engine(result_cache_bytes=1 << 24)
    engine.generate(varied(7, 20, 0.3, num_images=2))
    cached_flags = [engine.generate(varied(7, seed, 0.3))[0].cached for seed in (20, 21, 22)]
    assert cached_flags == ["hit", "hit", None]
    assert engine.generate(varied(8, 20, 0.3))[0].cached is None
    before = engine.stats().results
    engine.generate(varied(8, None, 0.3))
    assert engine.stats().results == before, "what nobody can ask for again is not kept"


def test_seeds_that_cannot_be_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"variation_strength is 1.5; .* between 0 and 1") as refused:
        DiffusionParams(variation_strength=1.5)
    assert refused.value.param == "variation_strength"
    with pytest.raises(InvalidRequest, match="variation_seed is -2; it must lie between 0 and") as refused:
        varied(7, -2, 0.3)
    assert refused.value.param == "variation_seed"
    with pytest.raises(InvalidRequest, match=r"the last of 2 images uses variation_seed \+ 1"):
        varied(7, MAX_SEED, 0.3, num_images=2)
    request = varied(MAX_SEED, 3, 0.3, num_images=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerationRequest) == request
