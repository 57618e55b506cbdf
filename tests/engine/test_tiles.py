"""Tiled diffusion against a plain loop over diffusers, and in one batch with images without tiles."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from diffserve.api.errors import InvalidRequest
from diffserve.api.tiles import plan_tiles
from diffserve.api.types import GenerationRequest, ImageResult, Picture
from diffserve.engine.image import scheduler
from tests.device import DEVICE
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request, load_pipeline, spacing_of, use_sampler

TOLERANCE = 1e-3


def tiled_request(seed: int = 3, kind: str = "sd15", sampler: str = "ddim", **fields: Any) -> GenerationRequest:
    """Return a request of 128x96 px with tiles of 64 px that overlap by at least 16 px: 3 x 2 tiles."""
    defaults = {"width_px": 128, "height_px": 96, "tile_size": 64, "tile_overlap": 16, "num_steps": 5}
    return image_request(kind, sampler, seed, **{**defaults, **fields})


def content(result: ImageResult) -> tuple[bytes, bytes]:
    assert result.latents is not None
    return result.latents.data, result.picture.data


def reference_loop(pipeline: Any, request: GenerationRequest) -> NDArray[np.float32]:
    """Return final latents (C, h, w): every step evaluates each tile alone, and averages with weights sin² by hand."""
    params = request.diffusion
    use_sampler(pipeline, params.sampler or "", spacing_of("sd15"))
    scheduler, factor = pipeline.scheduler, pipeline.vae_scale_factor
    height, width = (request.height_px or 0) // factor, (request.width_px or 0) // factor
    texts = pipeline.encode_prompt(request.prompt, DEVICE, 1, True, negative_prompt=request.negative_prompt)
    scheduler.set_timesteps(params.num_steps, device=DEVICE)
    side, step = 64 // factor, 48 // factor
    noise = torch.randn(
        (1, pipeline.unet.config.in_channels, height, width), generator=torch.Generator().manual_seed(3)
    )
    latents = noise.to(DEVICE) * scheduler.init_noise_sigma
    ramp = torch.sin(torch.pi * (torch.arange(side) + 0.5) / side) ** 2
    weight = (ramp[:, None] * ramp[None]).to(DEVICE)
    lefts = [0, (width - side + 1) // 2, width - side] if width - side > step else [0, width - side]
    tops = [0, height - side]
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            scaled = scheduler.scale_model_input(latents, timestep)
            total, weights = torch.zeros_like(latents), torch.zeros((height, width), device=DEVICE)
            for top, left in itertools.product(tops, lefts):
                tile = scaled[..., top : top + side, left : left + side]
                cond, uncond = (
                    pipeline.unet(tile, timestep, encoder_hidden_states=embedding).sample for embedding in texts
                )
                guided = uncond + params.guidance_scale * (cond - uncond)
                total[..., top : top + side, left : left + side] += weight * guided
                weights[top : top + side, left : left + side] += weight
            latents = scheduler.step(total / weights, timestep, latents).prev_sample
    result: NDArray[np.float32] = latents[0].cpu().numpy()
    return result


@pytest.mark.parametrize("sampler", ["ddim", "dpmpp_2m", "euler"])
def test_latents_are_those_of_a_plain_loop_over_tiles(
    sampler: str, make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    request = tiled_request(sampler=sampler)
    [result] = make_engine().generate(request)
    reference = reference_loop(load_pipeline("StableDiffusionPipeline", tiny_model("sd15")), request)
    assert result.latents is not None
    assert result.latents.array.shape == reference.shape
    assert np.abs(result.latents.array - reference).max() < TOLERANCE
    assert (result.tile_size, result.tile_overlap) == (64, 16)


def scene(width: int, height: int) -> Picture:
    down, right = np.mgrid[0:height, 0:width]
    pixels = np.stack([down * 255 // height, right * 255 // width, 255 * (down > right)], axis=-1)
    return Picture.from_array(pixels.astype(np.uint8))


def various() -> list[GenerationRequest]:
    """Return tiled and other requests whose rows share calls."""
    start = scene(128, 96)
    mask = Picture.from_array(np.where(np.arange(128) < 64, 0, 255).astype(np.uint8)[None].repeat(96, 0))
    return [
        tiled_request(1),
        image_request("sd15", "euler_a", 2, num_steps=7),
        tiled_request(3, sampler="euler_a", guidance_scale=1.0, tile_overlap=0),
        tiled_request(4, init_image=start, strength=0.6),
        tiled_request(5, init_image=start, mask_image=mask, strength=1.0, sampler="dpmpp_2m"),
        image_request("sd15", "heun", 6, num_steps=4, guidance_scale=1.0),
        tiled_request(7, cache_interval=2, guidance_interval=(0.0, 0.5)),
        image_request("sd15", "ddim", 8, num_steps=3, hires_scale=2.0, tile_size=64, hires_strength=0.7),
    ]


@pytest.mark.parametrize("max_rows", [4, 16])
def test_bytes_do_not_depend_on_neighbors(max_rows: int, make_engine: MakeEngine) -> None:
    mixed = make_engine(max_rows=max_rows).generate(various())
    solo = make_engine(max_rows=max_rows)
    for together, request in zip(mixed, various(), strict=True):
        [alone] = solo.generate(replace(request, request_id="alone"))
        assert content(alone) == content(together)


def test_tiles_share_calls_with_other_images_and_are_split_over_calls(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=8, deterministic=False)
    engine.generate([tiled_request(), image_request("sd15", "ddim", 2, num_steps=40)])
    calls = [call for tick in engine.trace for call in tick.calls]
    assert any(len({row.request_id for row in call.rows}) == 2 for call in calls)
    assert max(len(call.rows) for call in calls) <= 8
    assert max(tick.num_rows for tick in engine.trace) >= 12


@pytest.mark.parametrize("fields", [{"sampler": "euler_a"}, {"sampler": "dpmpp_2m", "cache_interval": 2}])
def test_a_step_of_many_tiles_takes_several_ticks_and_lets_other_images_pass(
    fields: dict[str, Any], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    [single_image] = make_engine(max_rows=4).generate(tiled_request(**fields))
    monkeypatch.setattr(scheduler, "PART_S", 0.0)  # a part is one call
    engine = make_engine(max_rows=4)
    large = replace(tiled_request(**fields), client="large")
    small = replace(image_request("sd15", "ddim", 2, num_steps=3), client="small")
    results = engine.generate([large, small])
    assert content(results[0]) == content(single_image)
    assert results[0].num_evaluations == single_image.num_evaluations
    rows_of_ticks = [[row.request_id for call in tick.calls for row in call.rows] for tick in engine.trace]
    assert max(map(len, rows_of_ticks)) == 4
    ticks_of_large = [index for index, ids in enumerate(rows_of_ticks) if large.request_id in ids]
    ticks_of_small = [index for index, ids in enumerate(rows_of_ticks) if small.request_id in ids]
    assert len(ticks_of_large) == 15  # 5 steps of 12 rows
    assert ticks_of_small[-1] < ticks_of_large[5]


def test_one_tile_is_the_image_without_tiles(make_engine: MakeEngine) -> None:
    engine = make_engine()
    plain, tiled = (image_request("sd15", "ddim", 2, num_steps=4, tile_size=side) for side in (0, 64))
    assert content(engine.generate(plain)[0]) == content(engine.generate(tiled)[0])


@pytest.mark.parametrize("kind", ["sdxl", "inpaint9", "sd2"])
def test_other_families_are_tiled(kind: str, make_engine: MakeEngine) -> None:
    engine = make_engine(kind)
    inputs: dict[str, Any] = {"init_image": scene(128, 96), "strength": 0.8} if kind == "inpaint9" else {}
    request = tiled_request(kind=kind, **inputs)
    [result] = engine.generate(request)
    assert (result.picture.width_px, result.picture.height_px) == (128, 96)
    [again] = engine.generate(replace(request, request_id="again"))
    assert content(again) == content(result)


def test_time_ids_of_sdxl_are_those_of_crops(make_engine: MakeEngine) -> None:
    engine = make_engine("sdxl")
    engine.submit(tiled_request(kind="sdxl"))
    while not (tasks := [task for task in engine.scheduler.in_flight if task.state is not None]):
        engine.tick()
    time_ids = tasks[0].loaded_state.time_ids
    assert time_ids is not None
    assert time_ids.shape == (6, 2, 6)
    assert time_ids[0].tolist() == [[96, 128, 0, 0, 64, 64]] * 2
    assert time_ids[5].tolist() == [[96, 128, 32, 64, 64, 64]] * 2
    list(engine.events())


@pytest.mark.parametrize(
    ("width", "height", "tile", "overlap"), [(128, 96, 64, 16), (1024, 1024, 128, 32), (200, 64, 64, 0)]
)
def test_weights_add_up_to_one_and_tiles_overlap_enough(width: int, height: int, tile: int, overlap: int) -> None:
    layout = plan_tiles(width, height, tile, overlap, 8, 8)
    assert layout is not None
    total = np.zeros(layout.latent)
    for view in range(layout.num_tiles):
        total[layout.slices(view)] += layout.weights[view]
    assert np.abs(total - 1.0).max() < 1e-5
    for edges, side, length in zip((layout.tops, layout.lefts), layout.latent, layout.tile, strict=True):
        assert edges[-1] + length == side
        assert all(left + length - right >= overlap // 8 for left, right in itertools.pairwise(edges))


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"tile_size": 60}, "tile_size", "tile_size is 60 px; it must be a multiple of"),
        ({"tile_size": 1024}, "tile_size", "tile_size is 1024 px; this model allows at most"),
        ({"tile_overlap": 64}, "tile_overlap", "tile_overlap is 64 px; it must be less than tile_size, which is 64"),
        ({"width_px": 8192}, "size", "width is 8192 px; tiled images have at most 4096 px per side."),
        ({"width_px": 4096, "height_px": 4096}, "tile_size", "tiles for 4096x4096 px, and at most 1024 are allowed"),
        ({"tile_size": -1}, "tile_size", "tile_size is -1; it must lie between 0 and 2048"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(
    fields: dict[str, Any], param: str, text: str, make_engine: MakeEngine
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make_engine().generate(tiled_request(**fields))
    assert text in refused.value.message
    assert refused.value.param == param


def test_cancel_frees_the_slot(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request_id = engine.submit(tiled_request())
    for _ in range(3):
        engine.tick()
    engine.cancel(request_id)
    [*_] = engine.events()
    assert not engine.num_live
