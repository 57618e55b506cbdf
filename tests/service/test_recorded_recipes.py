"""Recorded recipes reproduce their images: over the API, A1111's API, the command line and the page."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffserve.api.errors import InvalidRequest
from diffserve.api.micro_conditioning import MicroConditioning
from diffserve.api.types import FILTERS, DenoisingRecipe, ImageResult, Picture, Timings
from diffserve.cli import main
from diffserve.client import ImageCapabilities
from diffserve.media.images import decode_image, read_infotext
from diffserve.media.infotext import parse_infotext, write_infotext
from diffserve.media.infotext_recipe import KEYS, NOT_REPEATED, request_of
from diffserve.service.images.schemas import GenerateBody
from schedulers import SAMPLERS, SPACINGS
from tests.service.server import GENERATIONS, RunningServer, error_of, files_of
from ui.create.parameters import form_of, order_of

share = st.floats(0.0, 1.0)
VALUES: Final[dict[str, st.SearchStrategy[Any]]] = {
    "num_inference_steps": st.integers(1, 1000),
    "sampler": st.sampled_from(sorted(SAMPLERS)),
    "sigma_schedule": st.sampled_from([None, "karras", "exponential", "sgm_uniform", "simple", "beta"]),
    "guidance_scale": st.floats(0.0, 100.0),
    "seed": st.integers(0, 2**63 - 1),
    "variation_seed": st.integers(0, 2**63 - 1),
    "variation_strength": share.filter(bool),
    "strength": share,
    "eta": share,
    "guidance_interval": st.tuples(share, share).map(sorted).map(tuple).filter(lambda pair: pair != (0.0, 1.0)),
    "clip_skip": st.integers(2, 12),
    "guidance_rescale": share.filter(bool),
    "cache_interval": st.integers(2, 100),
    "similarity_threshold": st.floats(0.01, 1.0),
    "sigma_min": st.floats(0.001, 1.0),
    "sigma_max": st.floats(2.0, 200.0),
    "micro_conditioning": st.builds(
        MicroConditioning, original_size=st.tuples(st.integers(1, 4000), st.integers(1, 4000))
    ),
    "switch_at": share,
    "noise_source": st.sampled_from(["cpu", "device"]),
    "spacing": st.sampled_from(sorted(SPACINGS)),
    "tile_size": st.integers(0, 2048),
    "tile_overlap": st.integers(0, 2048),
    "outpaint": st.sampled_from(["0,0,64,0", "8,16,24,32"]),
}
"""A value of each recorded field that is written; the size is that of the picture."""

HIRES_VALUES: Final[dict[str, st.SearchStrategy[Any]]] = {
    "hires_strength": share,
    "hires_steps": st.integers(1, 1000),
    "hires_upscaler": st.sampled_from(sorted(FILTERS)),
    "hires_sampler": st.sampled_from(sorted(SAMPLERS)),
    "hires_schedule": st.sampled_from(["karras", "exponential", "sgm_uniform", "simple", "beta"]),
    "hires_prompt": st.sampled_from(["a fox, red: sharp", "a dog"]),
    "hires_negative_prompt": st.sampled_from(["blurred, dark", "a dog"]),
}
HIRES_SIZES: Final = (
    st.fixed_dictionaries({"hires_scale": st.floats(1.0, 8.0)}),
    st.fixed_dictionaries({"hires_size": st.sampled_from(["640x480", "1024x1024"])}),
)
"""Hires fix is recorded only for images from text, and with one of two sizes."""

RESULT_NAMES: Final = {"num_inference_steps": "num_steps"}
IN_THE_PROMPT: Final = frozenset({"loras"})
NEEDS_A_PICTURE: Final = frozenset({"controlnets", "references"})


def result_with(**fields: Any) -> ImageResult:
    plain: dict[str, Any] = {
        "request_id": "img-1", "image_index": 0, "seed": 42, "prompt": "a fox", "negative_prompt": "",
        "sampler": "ddim", "num_steps": 25, "num_evaluations": 50, "guidance_scale": 3.0, "eta": 0.0,
        "spacing": "trailing", "sigma_schedule": None, "model": "sd15", "model_digest": "sha256:0123456789abcdef",
    }  # fmt: skip
    picture = Picture.from_array(np.zeros((96, 64, 3), np.uint8))
    timings = Timings(queue_s=0, encode_s=0, denoise_s=0, decode_s=0, step_s=0)
    return ImageResult(**plain | fields, picture=picture, timings=timings)


def test_every_field_of_a_recipe_is_recorded_and_every_recorded_field_is_read() -> None:
    hires = {"hires_scale", "hires_size", *HIRES_VALUES} - {"hires_strength"}  # recorded as the denoising strength
    assert set(KEYS) - {"size"} == set(VALUES) | hires, "say above which values a new recorded field has"
    recorded = {RESULT_NAMES.get(name, name) for name in KEYS} | {"hires_strength"}
    assert set(DenoisingRecipe.__struct_fields__) - recorded == IN_THE_PROMPT | NEEDS_A_PICTURE, (
        "a recipe has a new field"
    )
    result = result_with(
        similarity=0.9, similarity_threshold=0.8, skipped_steps=2, lora_digests={"ink": "12"}, word_digests={"x": "34"},
        refiner="sdxl", score=1.0, interrupted_after=3, original_prompt="fox", strength=0.5, switch_at=0.8,
        variation_seed=1, variation_strength=0.5, eta=0.5, guidance_interval=(0.2, 0.8), clip_skip=2, cache_interval=2,
        guidance_rescale=0.5, sigma_schedule="karras", sigma_min=0.03, sigma_max=9.0,
        micro_conditioning=MicroConditioning(original_size=(640, 480)), tile_size=64, tile_overlap=8,
        outpaint="0,0,64,0", template="{a|b} fox",
    )  # fmt: skip
    enlarged = msgspec.structs.replace(
        result, hires_scale=2.0, hires_size="640x480", hires_strength=0.5, hires_sampler="ddim", hires_steps=5,
        hires_schedule="karras", hires_prompt="a", hires_negative_prompt="b",
    )  # fmt: skip
    written = parse_infotext(write_infotext(result, width_px=128, height_px=192)).fields
    written |= parse_infotext(write_infotext(enlarged, width_px=128, height_px=192)).fields
    unused = {"ControlNet 0", "Reference 0", "Sampler hash"}
    assert set(written) == set(KEYS.values()) | NOT_REPEATED - unused, "the writer has a new key"
    assert set(KEYS) - {"strength"} <= set(GenerateBody.model_fields)


@given(st.one_of(*HIRES_SIZES), st.fixed_dictionaries(HIRES_VALUES))
def test_a_written_second_pass_is_read_as_the_same_request(size: dict[str, Any], fields: dict[str, Any]) -> None:
    text = write_infotext(result_with(**size, **fields), width_px=64, height_px=96)
    recorded, warnings = request_of(parse_infotext(text))
    assert warnings == ()
    expected = size | fields
    read = {name: value for name, value in recorded.items() if name.startswith("hires_")}
    assert read == expected | {"hires_sampler": SAMPLERS[fields["hires_sampler"]].label}


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_a_written_recipe_is_read_as_the_same_request(fields: dict[str, Any]) -> None:
    if "similarity_threshold" in fields:
        fields["similarity"] = 0.9
    if "eta" in fields:
        fields["sampler"] = "ddim"
    result = result_with(**{RESULT_NAMES.get(name, name): value for name, value in fields.items()})
    text = write_infotext(result, width_px=64, height_px=96)
    recorded = request_of(parse_infotext(text), has_start=True).fields
    assert (recorded["prompt"], recorded["size"]) == ("a fox", "64x96")
    for name in VALUES:
        value = getattr(result, RESULT_NAMES.get(name, name))
        if name == "sampler":
            value = SAMPLERS[value].label
        if isinstance(value, MicroConditioning):
            value = {part: side for part, side in msgspec.structs.asdict(value).items() if side is not None}
        if name in recorded:
            assert recorded[name] == value, name
        else:
            assert name not in fields or value in (None, 0.0), name


def test_merged_tokens_of_earlier_versions_cause_a_warning() -> None:
    recorded = request_of(parse_infotext("a fox\nSteps: 4, Sampler: DDIM, CFG scale: 3, Token merging ratio: 0.5"))
    assert recorded.fields["num_inference_steps"] == 4
    assert "token_merging" not in recorded.fields
    assert recorded.warnings == ("The parameters have Token merging ratio, which this server does not support.",)


RECIPES: Final[dict[str, Callable[[random.Random], Any]]] = {
    "num_inference_steps": lambda dice: dice.randint(3, 6),
    "sampler": lambda dice: dice.choice(["ddim", "euler", "euler_a", "dpmpp_2m", "unipc", "heun", "lms"]),
    "sigma_schedule": lambda dice: dice.choice([None, "karras", "exponential", "sgm_uniform"]),
    "guidance_scale": lambda dice: round(dice.uniform(1.5, 9.0), dice.randint(0, 12)),
    "seed": lambda dice: dice.randrange(2**53),
    "size": lambda dice: dice.choice(["64x64", "64x96", "96x64"]),
    "variation_seed": lambda dice: dice.randrange(2**32),
    "variation_strength": lambda dice: round(dice.random(), 3),
    "guidance_interval": lambda dice: sorted(round(dice.random(), 3) for _ in range(2)),
    "guidance_rescale": lambda dice: round(dice.random(), 3),
    "clip_skip": lambda dice: dice.randint(1, 2),
    "cache_interval": lambda dice: dice.randint(1, 3),
    "noise_source": lambda dice: dice.choice(["cpu", "device"]),
    "spacing": lambda dice: dice.choice(sorted(SPACINGS)),
    "eta": lambda dice: round(dice.random(), 3),
    "sigma_min": lambda dice: round(dice.uniform(0.02, 0.1), 3),
    "sigma_max": lambda dice: round(dice.uniform(8.0, 14.0), 3),
    "tile_size": lambda _: 64,
    "tile_overlap": lambda dice: dice.choice([0, 8, 32]),
    "hires_scale": lambda dice: dice.choice([1.0, 1.25, 1.5]),
    "hires_strength": lambda dice: round(dice.uniform(0.5, 1.0), 3),
    "hires_steps": lambda dice: dice.randint(3, 5),
    "hires_upscaler": lambda dice: dice.choice(FILTERS),
    "hires_sampler": lambda dice: dice.choice(["ddim", "euler_a"]),
    "hires_prompt": lambda dice: dice.choice(["a dog", "a fox: red, sharp"]),
    "hires_negative_prompt": lambda dice: dice.choice(["a dog", "rain, fog"]),
}
"""A random value of each field that the tiny model takes."""

OTHERS: Final = {
    *("strength", "outpaint", "similarity_threshold", "micro_conditioning", "switch_at", "hires_size", "hires_schedule")
}
"""Recorded fields that need a picture, a kept picture, SDXL or a refiner, or exclude others."""


def recipe_of(number: int, refused: tuple[str, ...]) -> dict[str, Any]:
    dice = random.Random(number)
    taken = {name: value(dice) for name, value in RECIPES.items() if name not in refused}
    optional = [name for name in taken if name not in ("num_inference_steps", "size", "seed", "sampler")]
    for name in dice.sample(optional, len(optional) // 3):
        del taken[name]
    if taken["sampler"] not in ("ddim", "euler_a"):
        taken.pop("eta", None)
    if taken["sampler"] in ("ddim", "unipc"):
        taken.pop("sigma_schedule", None)
    if "tile_size" not in taken:
        taken.pop("tile_overlap", None)
    if "hires_scale" not in taken:
        taken = {name: value for name, value in taken.items() if not name.startswith("hires_")}
    if "variation_strength" not in taken:
        taken.pop("variation_seed", None)
    negative = dice.choice(["", "dog, (cat:1.2)"])
    return taken | {
        "prompt": dice.choice(["a red fox, (snow:1.3)", "a fox\nin a field: two"]),
        "negative_prompt": negative,
    }


def pixels_of(file: bytes) -> Picture:
    return decode_image(file)


@pytest.fixture(scope="module")
def image(shared_server: RunningServer) -> ImageCapabilities:
    entry = shared_server.client.get("/v1/models/sd15").json()
    return msgspec.convert(entry["capabilities"]["image"], ImageCapabilities)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_a_random_recipe_is_reproducible_everywhere(
    server: RunningServer, image: ImageCapabilities, number: int, tmp_path: Path
) -> None:
    assert set(RECIPES) | OTHERS == set(KEYS) | {"hires_strength"}, "say above how a new recorded field is chosen"
    client = server.client
    recipe = recipe_of(number, image.refused_fields)
    first = client.post(GENERATIONS, json=recipe)
    [file] = files_of(first)
    text = read_infotext(file)
    assert text is not None
    picture = pixels_of(file)
    repeated = client.post(GENERATIONS, json={"infotext": text})
    assert pixels_of(files_of(repeated)[0]) == picture, f"API: {text}"
    unused = "the negative prompt has no effect without guidance and was not used."  # therefore not recorded
    assert repeated.json()["warnings"] == [warning for warning in first.json()["warnings"] if warning != unused]
    a1111 = client.post("/sdapi/v1/txt2img", json={"infotext": text}).json()
    assert pixels_of(base64.b64decode(a1111["images"][0])) == picture, f"A1111: {text}"
    order = order_of(form_of(text, image), image)
    body = {**order.fields, "prompt": order.prompt, "partial_images": None}
    if not recipe.keys() & {"hires_scale", "tile_size"}:  # which the form does not have
        assert pixels_of(files_of(client.post(GENERATIONS, json=body))[0]) == picture, f"page: {text}"
    (tmp_path / "first.png").write_bytes(file)
    arguments = ["--infotext", str(tmp_path / "first.png"), "-o", str(tmp_path / "again.png"), "--server", server.url]
    with pytest.raises(SystemExit) as stopped:
        main(["generate", *arguments])
    assert stopped.value.code == 0
    assert pixels_of((tmp_path / "again.png").read_bytes()) == picture, f"command line: {text}"


@pytest.mark.slow
def test_fields_of_a_request_replace_those_of_its_infotext(server: RunningServer, tmp_path: Path) -> None:
    recipe = {"prompt": "a red fox", "num_inference_steps": 3, "seed": 5, "size": "64x64", "sampler": "DPM++ 2M Karras"}
    text = read_infotext(files_of(server.client.post(GENERATIONS, json=recipe))[0]) or ""
    changed = {"steps": 4, "width": 96, "height": 64, "sampler_name": "euler", "seed": 6}
    answer = server.client.post(GENERATIONS, json={"infotext": text, **changed}).json()
    assert (answer["num_inference_steps"], answer["size"], answer["sampler"]) == (4, "96x64", "euler")
    assert (answer["data"][0]["seed"], answer["sigma_schedule"]) == (6, None)
    foreign = text.replace("RNG: CPU", "RNG: GPU").replace("Model: sd15", "Model: dream") + ", Refiner switch at: 0.8"
    warnings = server.client.post(GENERATIONS, json={"infotext": foreign}).json()["warnings"]
    for words in ("generated by dream, which is not served", "RNG: GPU, which is unknown", "Refiner switch at: 0.8"):
        assert any(words in warning for warning in warnings), words
    wrong = server.client.post(GENERATIONS, json={"infotext": text.replace("Steps: 3", "Steps: x")})
    assert error_of(wrong)["message"].startswith("a value in the infotext cannot be used: Steps is 'x'")
    [file] = files_of(server.client.post(GENERATIONS, json=recipe))
    form: Any = {"prompt": (None, "a fox"), "infotext": (None, text), "image": ("a.png", file)}
    assert error_of(server.client.post("/v1/images/edits", files=form))["param"] == "infotext"
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(SystemExit):
        main(
            [
                "generate",
                "a boat",
                "--infotext",
                str(tmp_path / "a.txt"),
                "--steps",
                "2",
                "-o",
                str(tmp_path / "b.png"),
                "--server",
                server.url,
            ]
        )
    written = read_infotext((tmp_path / "b.png").read_bytes()) or ""
    assert written.startswith("a boat\nSteps: 2, Sampler: DPM++ 2M, Schedule type: Karras,")
    assert "Seed: 5, Size: 64x64" in written


@pytest.mark.slow
def test_the_command_line_reproduces_an_image_without_a_server(
    server: RunningServer, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    recipe = {
        "prompt": "a fox",
        "num_inference_steps": 3,
        "seed": 5,
        "size": "64x64",
        "spacing": "trailing",
        "sampler": "ddim",
    }
    [file] = files_of(server.client.post(GENERATIONS, json=recipe))
    (tmp_path / "first.png").write_bytes(file)
    (tmp_path / "float32.toml").write_text('[model]\ndtype = "float32"\n')
    arguments = ["--infotext", str(tmp_path / "first.png"), "-o", str(tmp_path / "again.png")]
    arguments += ["--model", str(tiny_model("sd15")), "--config", str(tmp_path / "float32.toml")]
    with pytest.raises(SystemExit) as stopped:
        main(["generate", *arguments])
    assert stopped.value.code == 0
    assert pixels_of((tmp_path / "again.png").read_bytes()) == pixels_of(file)


def test_an_invalid_recipe_value_is_reported() -> None:
    for text in ("Steps: x, Sampler: y, Seed: 1", "Steps: 1, Size: 9, Seed: 1", "Steps: 1, CFG scale: nan, Seed: 2"):
        with pytest.raises(InvalidRequest, match="a value in the infotext cannot be used"):
            request_of(parse_infotext(f"a fox\n{text}"))


def test_values_that_cannot_be_reproduced_are_reported() -> None:
    text = "a fox\nSteps: 2, Seed: 1, Size: 64x64, Hires upscale: 2, VAE: other, Denoising strength: 0.5"
    assert [warning.partition(",")[0] for warning in request_of(parse_infotext(text), has_start=True).warnings] == [
        "The image was enlarged in a second pass (hires fix)",
        "The parameters have VAE",
    ]
    fields, [warning] = request_of(parse_infotext(text))
    assert "VAE" in warning
    assert (fields["hires_scale"], fields["hires_strength"]) == (2.0, 0.5)


@pytest.mark.slow
def test_invalid_infotexts_are_refused_by_name_in_both_apis(server: RunningServer) -> None:
    for path in (GENERATIONS, "/sdapi/v1/txt2img"):
        for text, message in (
            ("a fox\nSteps: 999999999, Size: 64x64, Seed: 7", "999999999"),
            ("a fox\nSteps: 2, Size: 64x64, Seed: 99999999999999999999999999", "99999999999"),
            (5, "infotext is 5; it must be text"),
            ("a" * 9000 + "\nSteps: 2, Size: 64x64, Seed: 7", "infotext is too long"),
        ):
            answer = server.client.post(path, json={"infotext": text})
            assert answer.status_code == 400, answer.text
            assert message in answer.text, answer.text
