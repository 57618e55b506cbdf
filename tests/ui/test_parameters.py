"""Conversion of the page's fields to a request, and of an image's parameters to the fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.fields import MAX_SEED
from diffserve.api.types import MAX_PROMPT_CHARS
from diffserve.models.controlnets import Control
from tests.ui.capabilities import MODEL
from ui.create.parameters import (
    ASPECTS,
    FORM_FIELDS,
    NUMBERS,
    REWRITE_MODES,
    Form,
    check_lengths,
    doubts,
    form_of,
    infotext_of,
    order_of,
    quality_labels,
    sampler_labels,
    sampler_of,
    size_of,
)
from ui.create.settings import Fields
from ui.fields import read_seed

ROOT = Path(__file__).resolve().parents[2]
TEXT = (
    "a fox, and a cactus\nNegative prompt: night\nSteps: 12, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 4.5, "
    "Seed: 7, Size: 128x192, Model hash: 0123456789, Model: embedded, RNG: CPU, Spacing: trailing"
)


def test_an_untouched_form_requests_the_models_defaults() -> None:
    order = order_of(Form(prompt="a fox"), MODEL)
    assert order.prompt == "a fox"
    assert order.fields == {
        "n": 1,
        "size": "128x128",
        "num_inference_steps": 25,
        "partial_images": 3,
        "prompt_rewriter": "off",
        "output_format": "png",
    }


def test_every_field_reaches_the_request() -> None:
    form = Form(
        prompt="a fox", negative_prompt="night", quality="draft", aspect="landscape", num_images=3, rewrite_mode="Auto",
        steps="7", sampler=" ddim ", guidance="4,5", size="96 x 80", seed="11", spacing="leading", typed={"eta": "0.5"},
    )  # fmt: skip
    assert order_of(form, MODEL).fields == {
        "n": 3,
        "size": "96x80",
        "num_inference_steps": 7,
        "partial_images": 3,
        "prompt_rewriter": "auto",
        "output_format": "png",
        "negative_prompt": "night",
        "sampler": "ddim",
        "guidance_scale": 4.5,
        "eta": 0.5,
        "spacing": "leading",
        "seed": 11,
    }


@pytest.mark.parametrize(("quality", "steps"), [("draft", 10), ("standard", 25), ("fine", 50)])
def test_a_quality_sets_the_steps_unless_they_are_explicit(quality: str, steps: int) -> None:
    assert order_of(Form(prompt="a fox", quality=quality), MODEL).fields["num_inference_steps"] == steps
    assert order_of(Form(prompt="a fox", quality=quality, steps="3"), MODEL).fields["num_inference_steps"] == 3


def test_qualities_and_samplers_have_descriptive_labels() -> None:
    one_step = msgspec.structs.replace(MODEL, quality_steps={"draft": 1, "standard": 4})
    assert quality_labels(MODEL)[1] == ("Standard, 25 steps", "standard")
    assert quality_labels(one_step)[0] == ("Draft, 1 step", "draft")
    default = ("Default (DPM++ 2M)", "")
    assert sampler_labels(MODEL) == [default, ("DDIM", "ddim"), ("DPM++ 2M", "dpmpp_2m")]


@pytest.mark.parametrize(
    ("sizes", "aspect", "expected"),
    [
        (((128, 128), (128, 192), (192, 128)), "portrait", (128, 192)),
        (((1024, 1024), (832, 1216), (1216, 832)), "landscape", (1216, 832)),
        (((512, 512),), "landscape", (624, 416)),
        (((512, 512),), "square", (512, 512)),
        (((128, 192),), "square", (160, 160)),
    ],
)
def test_an_aspect_gives_a_recommended_size_or_one_of_equal_area(
    sizes: tuple[tuple[int, int], ...], aspect: str, expected: tuple[int, int]
) -> None:
    assert size_of(aspect, msgspec.structs.replace(MODEL, sizes=sizes)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "  "}, "the prompt is empty"),
        ({"prompt": None}, "the prompt is empty"),
        ({"seed": "seven"}, "'seven'"),
        ({"seed": "-2"}, "'-2'"),
        ({"seed": str(MAX_SEED + 1)}, str(MAX_SEED)),
        ({"seed": "9" * 5000}, "seed"),
        ({"seed": "0" * 20 + "9" * 20}, "seed"),
        ({"steps": "1001"}, "from 1 to 1000"),
        ({"steps": "0"}, "from 1 to 1000"),
        ({"steps": "2.5"}, "whole number"),
        ({"steps": "many"}, "'many'"),
        ({"guidance": "31"}, "from 0 to 30"),
        ({"guidance": "nan"}, "'nan'"),
        ({"typed": {"eta": "2"}}, "from 0 to 1"),
        ({"size": "big"}, "'big'"),
        ({"aspect": "round"}, "'round'"),
    ],
)
def test_an_invalid_value_is_reported_with_the_fix(changes: dict[str, Any], message: str) -> None:
    form = msgspec.structs.replace(Form(prompt="a fox"), **changes)
    with pytest.raises(InvalidRequest) as caught:
        order_of(form, MODEL)
    assert message.lower() in caught.value.message.lower()


@pytest.mark.parametrize(
    ("text", "seed"),
    [(None, None), ("", None), (" ", None), ("-1", None), ("0", 0), (str(MAX_SEED), MAX_SEED), ("0" * 5000, 0)],
)
def test_a_missing_seed_is_random(text: str | None, seed: int | None) -> None:
    assert read_seed(text) == seed


@pytest.mark.parametrize(
    ("steps", "size", "expected"),
    [
        ("50", "128x192", ("fine", "portrait", None, None)),
        ("25", "128x128", ("standard", "square", None, None)),
        ("12", "96x80", (None, None, "12", "96x80")),
    ],
)
def test_quality_and_aspect_follow_an_image_and_agree_with_its_fields(
    steps: str, size: str, expected: tuple[str | None, ...]
) -> None:
    form = form_of(TEXT.replace("Steps: 12", f"Steps: {steps}").replace("128x192", size), MODEL)
    assert (form.quality, form.aspect, form.steps, form.size) == expected
    fields = order_of(form, MODEL).fields
    assert (str(fields["num_inference_steps"]), fields["size"]) == (steps, size)


def test_parameters_fill_the_fields_that_reproduce_the_image() -> None:
    form = form_of(TEXT, MODEL)
    assert (form.prompt, form.negative_prompt, form.rewrite_mode, form.num_images) == (
        "a fox, and a cactus",
        "night",
        "Off",
        1,
    )
    fields = order_of(form, MODEL).fields
    assert fields == {
        "n": 1,
        "size": "128x192",
        "num_inference_steps": 12,
        "partial_images": 3,
        "prompt_rewriter": "off",
        "output_format": "png",
        "negative_prompt": "night",
        "sampler": "DPM++ 2M Karras",
        "guidance_scale": 4.5,
        "spacing": "trailing",
        "seed": 7,
        "noise_source": "cpu",
    }


def test_an_eta_of_zero_and_every_digit_reach_the_request() -> None:
    text = TEXT.replace("DPM++ 2M, Schedule type: Karras", "Euler a").replace("4.5", "2.123456789")
    fields = order_of(form_of(f"{text}, Eta: 0", MODEL), MODEL).fields
    assert (fields["sampler"], fields["eta"], fields["guidance_scale"]) == ("Euler a", 0.0, 2.123456789)


@pytest.mark.parametrize(
    ("written", "interval"), [("0.2-0.8", (0.2, 0.8)), ("1e-05-0.5", (1e-5, 0.5)), ("0-2.5e-07", (0.0, 2.5e-7))]
)
def test_a_guidance_interval_is_read_back_from_an_image(written: str, interval: tuple[float, float]) -> None:
    fields = order_of(form_of(f"{TEXT}, Guidance interval: {written}", MODEL), MODEL).fields
    assert fields["guidance_interval"] == interval


def test_a_cache_interval_is_read_back_from_an_image() -> None:
    assert order_of(form_of(f"{TEXT}, Cache interval: 3", MODEL), MODEL).fields["cache_interval"] == 3
    assert "cache_interval" not in order_of(form_of(TEXT, MODEL), MODEL).fields
    for odd in ("0", "2.5", "1001", "three"):
        with pytest.raises(InvalidRequest, match=f"The cache_interval is '{odd}'; give a") as refused:
            order_of(form_of(f"{TEXT}, Cache interval: {odd}", MODEL), MODEL)
        assert refused.value.param == "cache_interval"


def test_rescaled_guidance_is_read_back_from_an_image() -> None:
    assert order_of(form_of(f"{TEXT}, CFG rescale phi: 0.7", MODEL), MODEL).fields["guidance_rescale"] == 0.7
    assert "guidance_rescale" not in order_of(form_of(TEXT, MODEL), MODEL).fields


def test_a_variation_is_read_back_from_an_image() -> None:
    fields = order_of(form_of(f"{TEXT}, Variation seed: 21, Variation seed strength: 0.3", MODEL), MODEL).fields
    assert (fields["variation_seed"], fields["variation_strength"]) == (21, 0.3)
    assert not {"variation_seed", "variation_strength"} & order_of(form_of(TEXT, MODEL), MODEL).fields.keys()
    for name, odd, why in (
        ("variation_strength", "1.5", r"The variation_strength is '1.5'; give a number from 0 to 1"),
        ("variation_seed", "many", "The variation seed is 'many'; give a whole number from 0 to"),
    ):
        with pytest.raises(InvalidRequest, match=why) as refused:
            order_of(Form(prompt="a fox", typed={name: odd}), MODEL)
        assert refused.value.param == name


def test_the_refiner_switch_is_read_back_and_another_refiner_causes_a_warning() -> None:
    text = f"{TEXT}, Refiner: xl [01], Refiner switch at: 0.75"
    model = msgspec.structs.replace(MODEL, refiner="xl [01]")
    assert order_of(form_of(text, model), model).fields["switch_at"] == 0.75
    assert doubts(text, model) == ()
    assert "used the refiner xl [01], which is not loaded" in doubts(text, MODEL)[0]
    assert order_of(Form(prompt="a fox", typed={"best_of": "4"}), MODEL).fields["best_of"] == 4


def test_a_second_pass_and_tiles_are_read_back_from_an_image() -> None:
    first = "a fox\nSteps: 8, Sampler: DDIM, Seed: 1, Size: 128x128, Denoising strength: 0.3, "
    text = f"{first}Hires upscale: 1.5, Hires steps: 6, Hires upscaler: Lanczos, Tile size: 96, Tile overlap: 0"
    form = form_of(text, MODEL)
    assert form.strength is None
    assert doubts(text, MODEL) == ()
    fields = order_of(form, MODEL).fields
    expected = {"hires_scale": 1.5, "hires_steps": 6, "hires_strength": 0.3, "tile_size": 96, "tile_overlap": 0}
    assert {name: value for name, value in fields.items() if name in expected} == expected
    resized = f"{first}Hires resize: 256x256, Hires upscaler: Nearest, Hires sampler: DDPM"
    assert order_of(form_of(resized, MODEL), MODEL).fields["hires_scale"] == 2
    (reason,) = doubts(resized, MODEL)
    assert "Hires sampler, Hires upscaler" in reason
    assert not [name for name in order_of(form_of(first, MODEL), MODEL).fields if name.startswith("hires")]
    for name, text, message in (
        ("hires_scale", "0.5", "hires_scale is 0.5; it must lie between 1 and 8"),
        ("tile_size", "4096", "The tile_size is '4096'; give a whole number from 0 to 2048"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            order_of(Form(prompt="a fox", typed={name: text}), MODEL)


def test_unsupported_values_are_not_read_into_hidden_fields() -> None:
    text = f"{TEXT}, Clip skip: 2, Cache interval: 1, Eta: 0.5, Similarity threshold: 0.9, Similarity: 0.95"
    assert doubts(text, MODEL)[1:] == ()
    model = msgspec.structs.replace(MODEL, refused_fields=("clip_skip", "cache_interval", "similarity_threshold"))
    fields = order_of(form_of(text, model), model).fields
    assert fields["eta"] == 0.5
    assert not {"clip_skip", "similarity_threshold"} & fields.keys()
    similar, refused = doubts(text, model)
    assert "started from a stored image" in similar
    assert refused == "The model does not support some of its settings (Clip skip): the result will differ."


def test_adapters_are_read_by_name_and_scale_and_must_exist() -> None:
    refused = {"fur": "it is DoRA; plain LoRA is served."}
    model = msgspec.structs.replace(MODEL, loras=("ink", "paper cut"), refused_loras=refused)
    fields = order_of(Form(prompt="a fox", loras=" ink:0.5, paper cut "), model).fields
    assert fields["loras"] == [{"name": "ink", "scale": 0.5}, {"name": "paper cut", "scale": 1.0}]
    assert "loras" not in order_of(Form(prompt="a fox", loras=" , "), model).fields
    for odd, why in (
        ("chalk", "no adapter 'chalk'; choose from ink, paper cut"),
        ("fur:0.5", "adapter 'fur' cannot be used: it is DoRA; plain LoRA is served."),
        ("ink:x", "write NAME or NAME:SCALE"),
    ):
        with pytest.raises(InvalidRequest, match=why) as raised:
            order_of(Form(prompt="a fox", loras=odd), model)
        assert raised.value.param == "loras"
    with pytest.raises(InvalidRequest, match="this server has none"):
        order_of(Form(prompt="a fox", loras="ink"), MODEL)


def test_a_controlnet_uses_its_selected_image() -> None:
    model = msgspec.structs.replace(MODEL, controlnets=("edges",))
    form = Form(prompt="a fox", control="edges", control_scale="0,5", control_steps="0-0.5", preprocessor="canny")
    [control] = order_of(form, model, None, b"file").fields["controlnets"]
    numbers = {"scale": 0.5, "start": 0.0, "end": 0.5}
    assert control == {"name": "edges", "image": b"file", "preprocessor": "canny", "resize": True, **numbers}
    assert "controlnets" not in order_of(Form(prompt="a fox", control=""), model, None, b"file").fields
    for changes, picture, why in (
        ({"control": "depth"}, b"file", "no ControlNet 'depth'; choose from edges"),
        ({}, None, "has no control image; choose one"),
        ({"control_scale": "3"}, b"file", "from 0 to 2"),
        ({"control_steps": "0.5-0.5"}, b"file", "0 <= start < end <= 1"),
        ({"control_steps": "half"}, b"file", "The active range of the ControlNet is 'half'"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            order_of(msgspec.structs.replace(form, **changes), model, None, picture)


def test_a_selected_model_is_requested_by_name() -> None:
    assert order_of(Form(prompt="a fox", model="photo"), MODEL).fields["model"] == "photo"
    assert "model" not in order_of(Form(prompt="a fox"), MODEL).fields


def test_the_form_and_the_page_have_the_same_field_order() -> None:
    assert Form.__struct_fields__ == (*Fields._fields, "uses_references")
    values = [f"{number}" for number in range(len(FORM_FIELDS))]
    assert [*Form.of(values).texts.values()] == values
    assert Form.of(values).values == tuple(
        int(value) if name in NUMBERS else value for name, value in zip(FORM_FIELDS, values, strict=True)
    )
    assert Form.of([2.0, *values[1:]]).prompt == "2"
    assert Form(prompt="a fox").values[:2] == ("a fox", "")


def test_size_conditioning_is_read_back_from_an_image() -> None:
    fields = order_of(form_of(f"{TEXT}, Micro conditioning: crop 8x16 target_size 96x80", MODEL), MODEL).fields
    sizes = {name: pair for name, pair in fields["micro_conditioning"].items() if pair is not None}
    assert sizes == {"crop": (8, 16), "target_size": (96, 80)}
    with pytest.raises(InvalidRequest, match="micro_conditioning is 'large'; write names and pairs"):
        order_of(Form(prompt="a fox", typed={"micro_conditioning": "large"}), MODEL)


def test_noise_source_and_start_image_are_read_back_from_an_image() -> None:
    cuda = TEXT.replace("RNG: CPU", "RNG: NV")
    assert order_of(form_of(cuda, MODEL), MODEL).fields["noise_source"] == "device"
    assert "noise_source" not in order_of(form_of(cuda.replace("RNG: NV, ", ""), MODEL), MODEL).fields
    text = f"{TEXT}, Similarity threshold: 0.9"
    assert "similarity_threshold" not in order_of(form_of(text, MODEL), MODEL).fields, "it began from noise"
    assert order_of(form_of(f"{text}, Similarity: 0.95", MODEL), MODEL).fields["similarity_threshold"] == 0.9
    with pytest.raises(InvalidRequest, match=r"The similarity_threshold is '1.5'; give a number from 0 to 1"):
        order_of(Form(prompt="a fox", typed={"similarity_threshold": "1.5"}), MODEL)


def test_a_missing_image_count_is_one() -> None:
    assert order_of(Form(prompt="a fox", num_images=None), MODEL).num_images == 1


def test_a_sampler_without_a_schedule_is_the_listed_one() -> None:
    plain = TEXT.replace("Schedule type: Karras, ", "")
    assert form_of(plain, MODEL).sampler == "dpmpp_2m"
    assert form_of(plain.replace("DPM++ 2M", "Restart"), MODEL).sampler == "Restart"
    assert sampler_of(plain) == "DPM++ 2M"


def test_an_image_of_another_model_causes_a_warning() -> None:
    assert doubts(TEXT, MODEL) == ()
    (doubt,) = doubts(TEXT.replace("0123456789", "ffff").replace(": embedded", ": sdxl"), MODEL)
    assert "sdxl" in doubt


def test_an_image_made_from_another_image_causes_a_warning() -> None:
    (doubt,) = doubts(f"{TEXT}, Similarity threshold: 0.9, Similarity: 0.9712, Skipped steps: 8", MODEL)
    assert "prompt similarity 0.9712 and skipped 8 steps" in doubt
    assert doubts(f"{TEXT}, Similarity threshold: 0.9", MODEL) == ()
    (doubt,) = doubts(f'{TEXT}, ControlNet 0: "{Control("edges").label}"', MODEL)
    assert "not in the file" in doubt


def test_an_unknown_spacing_is_omitted_with_a_warning() -> None:
    odd = TEXT.replace("Spacing: trailing", "Spacing: ZEBRASECRET" + "x" * 100)
    assert form_of(odd, MODEL).spacing is None
    (doubt,) = doubts(odd, MODEL)
    assert "ZEBRASECRET" in doubt
    assert len(doubt) < 200


@pytest.mark.parametrize("pair", ["Sampler: odd", "Size: odd", "Steps: odd", "CFG scale: odd", "Seed: odd", "Eta: odd"])
def test_free_text_of_an_image_reaches_only_text_fields(pair: str) -> None:
    form = form_of(f"a fox\nSteps: 5, Seed: 1, Model: m, {pair}", MODEL)
    assert form.quality in (None, *MODEL.quality_steps)
    assert form.aspect in (None, *ASPECTS)
    assert form.rewrite_mode in REWRITE_MODES
    assert (form.spacing, form.num_images) == (None, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "x" * (MAX_PROMPT_CHARS + 1)}, "The prompt has 32001 characters; at most 32000"),
        ({"negative_prompt": "x" * 1_000_000}, "The negative prompt has 1000000 characters"),
        ({"steps": "5" * 201}, "The steps has 201 characters; at most 200"),
        ({"sampler": ["ddim"]}, "The sampler must be text"),
    ],
)
def test_a_text_that_is_too_long_is_refused(changes: dict[str, Any], message: str) -> None:
    check_lengths(Form(prompt="x" * MAX_PROMPT_CHARS, negative_prompt=None))
    with pytest.raises(InvalidRequest, match=message):
        check_lengths(msgspec.structs.replace(Form(prompt="a fox"), **changes))


def test_the_parameters_of_a_real_file_are_read() -> None:
    form = form_of(infotext_of((ROOT / ".assets" / "fox.png").read_bytes()), MODEL)
    assert (form.prompt, form.seed) == ("a fox next to a cactus on the beach", "19")


@pytest.mark.parametrize("data", [b"", b"not a picture", b"\x89PNG\r\n\x1a\nbroken"])
def test_a_file_that_is_not_an_image_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        infotext_of(data)


def test_an_image_without_parameters_is_refused() -> None:
    from io import BytesIO

    from PIL import Image

    file = BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    with pytest.raises(InvalidRequest, match="has no generation parameters"):
        infotext_of(file.getvalue())
