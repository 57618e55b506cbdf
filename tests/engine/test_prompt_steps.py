"""Prompt editing, alternation, AND and MASK: parity with a loop over diffusers' UNet, and mixed batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import GenerationRequest, ImageResult
from diffserve.engine import Engine
from diffserve.media.infotext import write_infotext
from diffserve.models.controlnets import Control
from diffserve.models.loras import Lora
from diffserve.runtime import load_model
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.settings.config import EngineConfig
from tests.device import DEVICE
from tests.engine import controlnets, loras
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import PIPELINES, image_request, load_pipeline, spacing_of, use_sampler
from tests.engine.test_init_images import fields_of
from tests.engine.test_refiner import profile_of

TOLERANCE = 1e-4
Texts = Callable[[int], str]
Part = tuple[Texts, float, tuple[float, float, float, float]]
"""Texts by step, weight, and left, right, top and bottom of the area."""

EVERYWHERE = (0.0, 1.0, 0.0, 1.0)
LONG = "cat dog " * 40
"""Two windows of the text encoder."""


def reference_latents(
    directory: Path, kind: str, request: GenerationRequest, parts: list[Part], negative: Texts
) -> NDArray[np.float32]:
    """Return the final latents (C, h, w) of a loop over diffusers' UNet and scheduler.

    ``parts`` are those of Liu et al. 2022: uncond + scale * sum of w_i (cond_i - uncond), each in its area.
    """
    pipeline = load_pipeline(PIPELINES[kind], directory)
    params = request.diffusion
    assert params.sampler is not None
    assert request.seed is not None
    assert params.guidance_scale is not None
    use_sampler(pipeline, params.sampler, spacing_of(kind))
    scheduler = pipeline.scheduler
    scheduler.set_timesteps(params.num_steps, device=DEVICE)

    def encode(text: str) -> tuple[Any, dict[str, Any]]:
        if kind != "sdxl":
            return pipeline.encode_prompt(text, DEVICE, 1, False)[0], {}
        states, _, pooled, _ = pipeline.encode_prompt(text, device=DEVICE, do_classifier_free_guidance=False)
        size = [[64, 64, 0, 0, 64, 64]]
        time_ids = torch.tensor(size, dtype=torch.float32, device=DEVICE)
        return states, {"added_cond_kwargs": {"text_embeds": pooled, "time_ids": time_ids}}

    generator = torch.Generator("cpu").manual_seed(request.seed)
    channels = pipeline.unet.config.in_channels
    cells = 64 // pipeline.vae_scale_factor
    x = torch.randn((1, channels, cells, cells), generator=generator).to(DEVICE) * scheduler.init_noise_sigma
    with torch.inference_mode():
        for step, timestep in enumerate(scheduler.timesteps):
            scaled = scheduler.scale_model_input(x, timestep)

            def predict(text: str) -> Any:
                states, more_inputs = encode(text)
                return pipeline.unet(scaled, timestep, encoder_hidden_states=states, **more_inputs).sample  # noqa: B023

            uncond = predict(negative(step))
            output = uncond.clone()
            for texts, weight, area in parts:
                left, right, top, bottom = (int(fraction * cells) for fraction in area)
                place = (..., slice(top, bottom), slice(left, right))
                output[place] += params.guidance_scale * weight * (predict(texts(step)) - uncond)[place]
            x = scheduler.step(output, timestep, x, return_dict=False)[0]
    latents: NDArray[np.float32] = x[0].float().cpu().numpy()
    return latents


def latents_of(result: ImageResult) -> NDArray[np.float32]:
    assert result.latents is not None
    return result.latents.array


CASES: dict[str, tuple[str, str, list[Part], Texts]] = {
    "edited": (
        "the [red:dog:0.5] fox", "cat",
        [(lambda step: "the red fox" if step < 3 else "the dog fox", 1.0, EVERYWHERE)], lambda _: "cat",
    ),
    "alternating": (
        "the [cat|dog|red] fox", "[cat:dog:2]",
        [(lambda step: f"the {('cat', 'dog', 'red')[step % 3]} fox", 1.0, EVERYWHERE)],
        lambda step: "cat" if step < 2 else "dog",
    ),
    "composed": (
        "the red fox AND a dog :0.6 AND [cat|red] :-0.3", "cat",
        [
            (lambda _: "the red fox", 1.0, EVERYWHERE), (lambda _: "a dog", 0.6, EVERYWHERE),
            (lambda step: ("cat", "red")[step % 2], -0.3, EVERYWHERE),
        ],
        lambda _: "cat",
    ),
    "areas": (
        "the fox :0.4 AND [cat|red] MASK(0 0.5, 0 1) :0.6 AND a dog MASK(.5 1, 0.25 0.75)", "cat",
        [
            (lambda _: "the fox", 0.4, EVERYWHERE),
            (lambda step: ("cat", "red")[step % 2], 0.6, (0.0, 0.5, 0.0, 1.0)),
            (lambda _: "a dog", 1.0, (0.5, 1.0, 0.25, 0.75)),
        ],
        lambda _: "cat",
    ),
    "one area": (
        "the fox MASK(0.25 1, 0 0.5)", "cat",
        [(lambda _: "the fox", 1.0, (0.25, 1.0, 0.0, 0.5))], lambda _: "cat",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
@pytest.mark.parametrize("sampler", ["ddim", "dpmpp_2m"])
def test_latents_are_those_of_a_loop_over_the_unet_of_diffusers(
    kind: str, sampler: str, make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    engine = make_engine(kind, max_rows=16)
    requests, expected = [], []
    for seed, (prompt, negative, parts, negatives) in enumerate(CASES.values()):
        request = image_request(kind, sampler, seed, num_steps=6, prompt=prompt, negative_prompt=negative)
        expected.append(reference_latents(tiny_model(kind), kind, request, parts, negatives))
        requests.append(request)
    for name, result, reference in zip(CASES, engine.generate(requests), expected, strict=True):
        assert np.abs(latents_of(result) - reference).max() < TOLERANCE * np.abs(reference).max(), name
    assert max(len(set(tick.request_ids)) for tick in engine.trace) > 3


def test_a_prompt_between_two_switches_has_the_bytes_of_plain_prompts(make_engine: MakeEngine) -> None:
    """An edit at the first or after the last step is the plain prompt."""
    engine = make_engine()
    prompts = ("the [cat:red:0.0] fox", "the red fox", "the [red:cat:1.0] fox", "the [red:cat:10] fox")
    first, *same_images = (
        latents_of(engine.generate(image_request("sd15", "heun", 1, prompt=each))[0]) for each in prompts
    )
    for other in same_images:
        assert np.array_equal(first, other)


@pytest.mark.parametrize("paged", ["paged", "plain"])
def test_bytes_of_changing_prompts_in_a_mixed_batch_are_those_of_the_solo_run(
    paged: str, make_engine: MakeEngine
) -> None:
    def requests() -> list[GenerationRequest]:
        asks: list[dict[str, Any]] = [
            {"prompt": "the red fox"},
            {"prompt": "the red fox AND a dog :0.6 AND [cat|red]", "num_steps": 7},
            {"prompt": f"the [cat:{LONG}:0.5] fox", "negative_prompt": "[cat|dog]", "num_steps": 4},
            {"prompt": "a dog", "guidance_scale": 1.0},
            {"prompt": "a [dog|cat]", "guidance_scale": 1.0, "num_steps": 5},
            {"prompt": "the dog AND the cat", "guidance_interval": (0.2, 0.6), "guidance_rescale": 0.5},
            {"prompt": "the [dog:cat:2] AND the cat :0.5", "cache_interval": 3},
            {"prompt": "cat", "cache_interval": 2},
            {"prompt": "the fox :0.5 AND cat MASK(0 0.5, 0 1) :0.5 AND dog MASK(0.5 1, 0 1) :0.5", "num_steps": 4},
            {"prompt": "cat MASK(0 0.5, 0 1)", "guidance_scale": 1.0, "num_steps": 4},
        ]
        return [image_request("sd15", ("euler_a", "ddim", "heun")[i % 3], i, **ask) for i, ask in enumerate(asks)]

    mixed = make_engine(max_rows=16, cross_attention=paged)
    together = mixed.generate(requests())
    assert max(len(set(tick.request_ids)) for tick in mixed.trace) > 3
    alone = make_engine(max_rows=16, cross_attention=paged)
    for result, request in zip(together, requests(), strict=True):
        [solo] = alone.generate(request)
        assert np.array_equal(latents_of(solo), latents_of(result)), request.prompt
        assert solo.picture.data == result.picture.data


def test_every_part_is_a_row_and_an_image_of_more_rows_than_a_tick_holds_is_painted(make_engine: MakeEngine) -> None:
    prompt = " AND ".join(["cat", "dog", "the red fox"])
    engine = make_engine(max_rows=2)
    few = [image_request("sd15", "ddim", 1, num_steps=3, prompt=prompt), image_request("sd15", "ddim", 2, num_steps=3)]
    results = engine.generate(few)
    assert [result.num_evaluations for result in results] == [12, 6]
    assert {row.part for tick in engine.trace for call in tick.calls for row in call.rows} == {
        "cond", "cond 2", "cond 3", "uncond",
    }  # fmt: skip
    again = image_request("sd15", "ddim", 1, num_steps=3, prompt=prompt)
    assert np.array_equal(latents_of(results[0]), latents_of(make_engine(max_rows=16).generate(again)[0]))


def test_parts_of_one_text_and_weights_of_one_in_all_are_the_plain_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine()
    plain = image_request("sd15", "ddim", 1, num_steps=4, prompt="the red fox")
    parts = image_request("sd15", "ddim", 1, num_steps=4, prompt="the red fox :0.25 AND the red fox :0.75")
    expected, result = (latents_of(each) for each in engine.generate([plain, parts]))
    assert np.abs(result - expected).max() < TOLERANCE
    unguided = image_request("sd15", "ddim", 1, num_steps=4, prompt="the red fox", guidance_scale=1.0)
    parts = image_request("sd15", "ddim", 1, num_steps=4, prompt="a dog :0.0 AND the red fox", guidance_scale=1.0)
    expected, result = (latents_of(each) for each in engine.generate([unguided, parts]))
    assert np.abs(result - expected).max() < TOLERANCE


def test_areas_that_share_an_image_between_them_are_the_plain_prompt(make_engine: MakeEngine) -> None:
    """Two halves with the same text equal the prompt without areas; an area smaller than a cell acts on one cell."""
    engine = make_engine()
    halves = "the red fox MASK(0 0.5, 0 1) AND the red fox MASK(0.5 1, 0 1)"
    tiles: dict[str, Any] = {"tile_size": 64, "tile_overlap": 32, "width_px": 96}
    for fields in ({}, tiles):
        prompts = ("the red fox", halves, f"{halves} AND a dog MASK(0.999 1, 0.999 1)")
        asks = [image_request("sd15", "ddim", 1, num_steps=2, prompt=prompt, **fields) for prompt in prompts]
        plain, both, dotted = (latents_of(result) for result in engine.generate(asks))
        assert np.abs(both - plain).max() < TOLERANCE
        assert np.abs(dotted - plain).max() > TOLERANCE


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": " AND ".join(["cat"] * 9)}, r"the prompt has 9 parts joined by AND; give at most 8"),
        ({"prompt": "cat AND dog :11"}, r"the part 'dog :11' of the prompt has the weight 11; keep it within 10"),
        ({"prompt": "cat MASK(0.5 0.5, 0 1)"}, r"MASK\(0.5 0.5, 0 1\) in the prompt is not an area; write left"),
        ({"prompt": f"[{'|'.join(str(n) for n in range(40))}]", "num_steps": 40}, r"the prompt has 40 different texts"),
        ({"negative_prompt": "[a|" * 9 + "]" * 9}, r"the negative prompt has brackets .* nested more than 8 deep"),
        ({"prompt": "[a|b]" * 65}, r"the prompt has more than 64 brackets"),
        ({"prompt": "[a|b]", "similarity_threshold": 0.9}, r"similarity_threshold is 0.9"),
    ],
)
def test_too_many_parts_and_texts_are_refused(fields: dict[str, Any], message: str, make_engine: MakeEngine) -> None:
    engine = make_engine(latent_cache_bytes=1 << 20)
    with pytest.raises(InvalidRequest, match=message):
        engine.submit(image_request("sd15", "ddim", 1, **fields))
    assert not engine.num_live


def test_texts_too_long_in_all_fail_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    pieces = "|".join(f"{'cat ' * 75 * 10}{number}" for number in range(8))
    with pytest.raises(InvalidRequest, match=r"over all steps and parts need \d+ chunks of 75 tokens; at most 64"):
        engine.generate(image_request("sd15", "ddim", 1, prompt=f"[{pieces}]"))


def test_images_of_one_request_have_their_own_prompts(make_engine: MakeEngine) -> None:
    prompts = ("cat", "the [red|dog] fox", "cat AND dog", "cat")
    fields: dict[str, Any] = {"num_steps": 3, "prompt": "cat", "num_images": 4, "image_prompts": prompts}
    engine = make_engine(max_rows=16, result_cache_bytes=1 << 24)
    results = engine.generate(image_request("sd15", "ddim", 5, template="{...}", **fields))
    assert [result.prompt for result in results] == list(prompts)
    assert [result.num_evaluations for result in results] == [6, 6, 9, 6]
    assert all('Template: "{...}"' in write_infotext(result, width_px=64, height_px=64) for result in results)
    for index, prompt in enumerate(prompts):
        [alone] = make_engine().generate(image_request("sd15", "ddim", 5 + index, num_steps=3, prompt=prompt))
        assert np.array_equal(latents_of(alone), latents_of(results[index]))
        [cached] = engine.generate(image_request("sd15", "ddim", 5 + index, num_steps=3, prompt=prompt))
        assert cached.cached == "hit"
    with pytest.raises(InvalidRequest, match="4 prompts were given for 1 images"):
        image_request("sd15", "ddim", 5, image_prompts=prompts)


@pytest.fixture(scope="module")
def everything(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """Return a maker of engines of the tiny SDXL with a refiner, adapters and ControlNets."""
    path = tiny_model("sdxl")
    profile = profile_of(path, refiner=tiny_model("refiner"))
    model = load_model(path, dtype="float32", device=DEVICE, profile=profile)
    unet = import_quietly("diffusers", "UNet2DConditionModel").from_pretrained(str(path / "unet"))
    folder = controlnets.write_folder(tmp_path_factory.mktemp("controlnets"), unet)
    model = loras.with_folder(model, loras.write_folder(tmp_path_factory.mktemp("loras"), model))
    model = controlnets.with_folder(model, folder)
    return lambda **config: Engine(model, EngineConfig(max_rows=16, **config))


OTHER_FIELDS: dict[str, dict[str, Any]] = {
    "ControlNet": {"controlnets": (Control("edges"),), "control_images": (controlnets.control_map(0),)},
    "LoRA": {"loras": (Lora("everything", 0.8),)},
    "refiner": {"switch_at": 0.5},
    "DeepCache": {"cache_interval": 2},
    "img2img": {"strength": 0.6, **fields_of(False)},
    "inpainting": {"strength": 0.8, **fields_of(True)},
}


def test_changing_prompts_work_with_other_fields_and_depend_on_no_neighbor(everything: Callable[..., Engine]) -> None:
    """An alternation of one text is the plain prompt; two equal parts of weight 1/2 are it within rounding."""
    ways = {
        "plain": "the red fox", "same": "the [red|red] fox", "parts": "the red fox :0.5 AND the red fox :0.5",
        "edited": "the [red:dog:0.5] fox", "composed": "the red fox AND [dog|cat] :0.5",
        "area": "the red fox AND a dog MASK(0 0.5, 0 1) :0.5",
    }  # fmt: skip

    def requests() -> dict[tuple[str, str], GenerationRequest]:
        return {
            (name, way): image_request("sdxl", "ddim", 3, num_steps=4, prompt=prompt, **fields)
            for name, fields in OTHER_FIELDS.items()
            for way, prompt in ways.items()
        }

    engine = everything()
    together = dict(zip(requests(), engine.generate([*requests().values()]), strict=True))
    assert max(len(set(tick.request_ids)) for tick in engine.trace) > 3
    alone = everything()
    for (name, way), request in requests().items():
        result, plain = together[name, way], latents_of(together[name, "plain"])
        [solo] = alone.generate(request)
        assert np.array_equal(latents_of(solo), latents_of(result)), (name, way)
        if way == "same":
            assert np.array_equal(latents_of(result), plain), name
        elif way == "parts":
            assert np.abs(latents_of(result) - plain).max() < TOLERANCE * np.abs(plain).max(), name
        elif way != "plain":
            assert np.abs(latents_of(result) - plain).max() > TOLERANCE * np.abs(plain).max(), (name, way)
    engine.check_integrity()
