"""Unsupported options of A1111 clients are named in warnings, in the header and in ``info``."""

from __future__ import annotations

import json
import time
from typing import Any, Final

import pytest

from diffserve.service.a1111.conversion import warnings_of
from diffserve.service.a1111.schemas import (
    FIELDS,
    HIRES_FIELDS,
    IMG2IMG_FIELDS,
    SETTINGS,
    Img2ImgBody,
    Txt2ImgBody,
    ignored,
    ignored_refiner,
)
from tests.service.server import RunningServer
from tests.service.test_a1111 import pixels_of, post
from tests.service.test_edits import in_base64, picture

DEFAULTS: Final[dict[str, Any]] = {
    "prompt": "", "negative_prompt": "", "styles": None, "seed": -1, "subseed": -1, "subseed_strength": 0,
    "seed_resize_from_h": -1, "seed_resize_from_w": -1, "sampler_name": None, "scheduler": None, "batch_size": 1,
    "n_iter": 1, "steps": 50, "cfg_scale": 7, "width": 512, "height": 512, "restore_faces": None, "tiling": None,
    "do_not_save_samples": False, "do_not_save_grid": False, "eta": None, "denoising_strength": None,
    "s_min_uncond": None, "s_churn": None, "s_tmax": None, "s_tmin": None, "s_noise": None, "override_settings": None,
    "override_settings_restore_afterwards": True, "refiner_checkpoint": None, "refiner_switch_at": None,
    "disable_extra_networks": False, "firstpass_image": None, "comments": None, "enable_hr": False,
    "firstphase_width": 0, "firstphase_height": 0, "hr_scale": 2, "hr_upscaler": None, "hr_second_pass_steps": 0,
    "hr_resize_x": 0, "hr_resize_y": 0, "hr_checkpoint_name": None, "hr_sampler_name": None, "hr_scheduler": None,
    "hr_prompt": "", "hr_negative_prompt": "", "force_task_id": None, "sampler_index": "Euler", "script_name": None,
    "script_args": [], "send_images": True, "save_images": False, "alwayson_scripts": {}, "infotext": None,
}  # fmt: skip
"""The fields of A1111 1.10's ``txt2img`` and their defaults."""

IMG2IMG_DEFAULTS: Final[dict[str, Any]] = {
    "init_images": None, "resize_mode": 0, "image_cfg_scale": None, "mask": None, "mask_blur_x": 4, "mask_blur_y": 4,
    "mask_blur": None, "mask_round": True, "inpainting_fill": 0, "inpaint_full_res": True,
    "inpaint_full_res_padding": 0, "inpainting_mask_invert": 0, "initial_noise_multiplier": None, "latent_mask": None,
    "include_init_images": False,
}  # fmt: skip
HARMLESS: Final = {
    *("do_not_save_samples", "do_not_save_grid", "save_images", "override_settings_restore_afterwards", "comments"),
    *("s_tmin", "s_tmax", "script_args", "image_cfg_scale", "mask_round"),
}
"""Fields without an effect of their own: about files, or parts of a field that is named."""

VALUES: Final[dict[str, Any]] = {"firstpass_image": "x", "latent_mask": "x", "hr_checkpoint_name": "other"}


def test_every_a1111_field_is_read_reported_or_harmless() -> None:
    for kind, names, more_fields in (
        (Txt2ImgBody, DEFAULTS.keys(), {}),
        (Img2ImgBody, DEFAULTS.keys() | IMG2IMG_DEFAULTS.keys(), IMG2IMG_FIELDS),
    ):
        names_known = kind.model_fields.keys() | FIELDS.keys() | HIRES_FIELDS.keys() | more_fields.keys() | HARMLESS
        assert names <= names_known, names - names_known


@pytest.mark.parametrize("hires", [False, True])
def test_defaults_of_a1111_cause_no_warning(hires: bool) -> None:
    assert warnings_of(Txt2ImgBody.model_validate(DEFAULTS | {"enable_hr": hires})) == []
    assert warnings_of(Img2ImgBody.model_validate(DEFAULTS | IMG2IMG_DEFAULTS)) == []
    written = {"s_churn": "0", "s_noise": 1.0, "tiling": False, "restore_faces": "false", "s_min_uncond": 0.0}
    assert warnings_of(Txt2ImgBody.model_validate(written)) == []


@pytest.mark.parametrize("name", [*FIELDS, *HIRES_FIELDS])
def test_ignored_field_that_would_change_the_image_is_reported(name: str) -> None:
    body = {"prompt": "a", "enable_hr": True, name: VALUES.get(name, True if FIELDS.get(name) == (False,) else "0.5")}
    assert ignored(Txt2ImgBody.model_validate(body)) == [f"{name} has no effect."]


@pytest.mark.parametrize(("name", "neutral"), SETTINGS.items())
def test_ignored_setting_that_would_change_the_image_is_reported(name: str, neutral: tuple[object, ...]) -> None:
    for value in neutral:
        assert ignored(Txt2ImgBody(override_settings={name: value})) == []
    (sentence,) = ignored(Txt2ImgBody(override_settings={name: "other" if isinstance(neutral[0], str) else 0.5}))
    assert sentence == f"override_settings.{name} has no effect."


def test_second_pass_fields_are_reported_only_with_a_second_pass() -> None:
    for enable_hr, number in ((True, 1), (False, 0)):
        body = Txt2ImgBody.model_validate({"enable_hr": enable_hr, "hr_checkpoint_name": "other"})
        assert len(ignored(body)) == number
        assert len(warnings_of(Txt2ImgBody(enable_hr=enable_hr, hr_upscaler="R-ESRGAN 4x+"))) == number


@pytest.mark.parametrize(
    ("fields", "beginning"),
    [
        ({"resize_mode": 3}, "resize_mode 3 (latent upscale) is not supported"),
        ({"mask": "x", "inpainting_fill": 2}, "inpainting_fill 2 (latents) is not supported"),
        ({"mask": "x", "inpainting_fill": 3}, "inpainting_fill 3 (latents) is not supported"),
        ({"mask": "x", "mask_blur_x": 4, "mask_blur_y": 9}, "mask_blur_x and mask_blur_y differ; the larger, 9,"),
        ({"initial_noise_multiplier": 0.9}, "initial_noise_multiplier has no effect."),
        ({"latent_mask": "x"}, "latent_mask has no effect."),
    ],
)
def test_ignored_img2img_field_that_would_change_the_image_is_reported(fields: dict[str, Any], beginning: str) -> None:
    (sentence,) = ignored(Img2ImgBody.model_validate(fields))
    assert sentence.startswith(beginning)
    assert ignored(Img2ImgBody(mask="x", mask_blur_x=4, mask_blur_y=4, inpainting_fill=1, resize_mode=2)) == []


def test_scripts_are_reported_unless_they_are_disabled() -> None:
    scripts = {
        "ADetailer": {"args": [True, False, {}]}, "Refiner": {"args": [False, "", 0.8]}, "Extra options": {"args": []},
        "ControlNet": {"args": [{"enabled": False}]}, "Tiled Diffusion": {"args": {"enabled": True}}, "Other": {},
    }  # fmt: skip
    sentences = ignored(Txt2ImgBody(alwayson_scripts=scripts))
    assert sentences == ['the script "ADetailer" is not supported.', 'the script "Tiled Diffusion" is not supported.']


def test_a_refiner_other_than_the_models_is_reported() -> None:
    refiner = "sdxl-refiner [0123456789]"
    for title in (None, "None", "sdxl-refiner", "sdxl-refiner [0123456789]"):
        assert ignored_refiner(Txt2ImgBody(refiner_checkpoint=title), refiner) == []
    (sentence,) = ignored_refiner(Txt2ImgBody(refiner_checkpoint="other [01]"), refiner)
    assert sentence.startswith("refiner_checkpoint is other; ")


@pytest.mark.slow
def test_warnings_are_in_the_header_and_the_info(server: RunningServer) -> None:
    body = {
        "prompt": "a red fox", "steps": 2, "width": 64, "height": 64, "seed": 1, "enable_hr": True, "hr_scale": 1.5,
        "restore_faces": True, "tiling": True, "hr_upscaler": "Latent", "override_settings": {"sd_vae": "other.pt"},
        "alwayson_scripts": {"ADetailer": {"args": [True]}},
    }  # fmt: skip
    answer = post(server, "txt2img", body)
    assert answer.status_code == 200, answer.text
    warnings = json.loads(answer.json()["info"])["warnings"]
    for sentence in (
        "restore_faces has no effect.", "tiling has no effect.",
        "override_settings.sd_vae has no effect.", 'the script "ADetailer" is not supported.',
        'hr_upscaler "Latent" is not one of /sdapi/v1/upscalers; the image was enlarged by Lanczos.',
    ):  # fmt: skip
        assert sentence in warnings
        assert sentence in answer.headers["x-diffserve-warnings"].replace('\\"', '"')
    plain = post(server, "txt2img", {"prompt": "a red fox", "steps": 1, "width": 64, "height": 64})
    assert json.loads(plain.json()["info"])["warnings"] == []
    start = {"init_images": [in_base64(picture(64, 64))], "prompt": "a", "steps": 2, "resize_mode": 3}
    repainted = post(server, "img2img", start | {"width": 64, "height": 64})
    assert "resize_mode 3 (latent upscale) is not supported" in json.loads(repainted.json()["info"])["warnings"][0]


@pytest.mark.slow
def test_options_without_effect_are_reported_when_they_are_set(server: RunningServer) -> None:
    answer = post(server, "options", {"sd_vae": "other.pt", "s_churn": 0, "samples_format": "png", "s_noise": "1.1"})
    assert answer.status_code == 200
    warnings = answer.headers["x-diffserve-warnings"]
    assert "sd_vae has no effect." in warnings
    assert "s_noise has no effect." in warnings
    assert "s_churn" not in warnings
    options = server.client.get("/sdapi/v1/options").json()
    assert "x-diffserve-warnings" not in post(server, "options", options).headers


@pytest.mark.slow
@pytest.mark.parametrize("upscaler", ["Nearest", "Lanczos"])
def test_size_of_the_second_pass_is_checked_before_the_first_one_is_generated(
    server: RunningServer, upscaler: str
) -> None:
    body = {"prompt": "a red fox", "steps": 1000, "width": 64, "height": 64, "enable_hr": True, "hr_upscaler": upscaler}
    for size, problem in (
        ({"hr_resize_x": 65536, "hr_resize_y": 65536}, "hires_size gives 65536x65536; each side must lie between"),
        ({"hr_scale": 0.1}, "hr_scale is 0.1; "),
    ):
        started_s = time.monotonic()
        answer = post(server, "txt2img", body | size)
        assert answer.status_code == 400
        assert problem in answer.json()["detail"]
        assert time.monotonic() - started_s < 2.0


@pytest.mark.slow
def test_each_listed_upscaler_enlarges_and_is_recorded_in_the_image(server: RunningServer) -> None:
    body = {
        "prompt": "a red fox", "steps": 4, "width": 64, "height": 64, "seed": 1, "enable_hr": True, "hr_scale": 1.5,
        "denoising_strength": 0.3,
    }  # fmt: skip
    names = [entry["name"] for entry in server.client.get("/sdapi/v1/upscalers").json()]
    assert names == ["None", "Lanczos", "Nearest", "embedded-4x"]
    replaced = json.loads(post(server, "txt2img", body | {"hr_upscaler": "R-ESRGAN 4x+"}).json()["info"])["warnings"]
    sentence = 'hr_upscaler "R-ESRGAN 4x+" is not one of /sdapi/v1/upscalers; the image was enlarged by Lanczos.'
    assert sentence in replaced
    pictures = {}
    for name in names:
        answer = post(server, "txt2img", body | {"hr_upscaler": name}).json()
        info = json.loads(answer["info"])
        assert "hr_upscaler" not in str(info["warnings"])
        upscaler = "Lanczos" if name == "None" else name
        assert f"Hires upscaler: {upscaler}" in info["infotexts"][0]
        again = post(server, "txt2img", {"infotext": info["infotexts"][0]}).json()
        pictures[name] = pixels_of(answer["images"][0])
        assert pixels_of(again["images"][0]) == pictures[name]
    assert pictures["None"] == pictures["Lanczos"]
    assert len(set(pictures.values())) == 3


@pytest.mark.slow
def test_unsupported_constructs_of_every_prompt_are_in_the_header_and_the_answer(server: RunningServer) -> None:
    beginnings = {
        "prompt": "'<hypernet:a:1>' in the prompt", "negative_prompt": "'<hypernet:b:1>' in the negative prompt",
        "hr_prompt": "'<hypernet:c:1>' in the prompt", "hr_negative_prompt": "'<hypernet:d:1>' in the negative prompt",
    }  # fmt: skip
    body = {
        "prompt": "a cat <hypernet:a:1>", "negative_prompt": "<hypernet:b:1>", "hr_prompt": "a cat <hypernet:c:1>",
        "steps": 2, "hr_negative_prompt": "<hypernet:d:1>", "enable_hr": True, "hr_scale": 1.5, "width": 64,
        "height": 64,
    }  # fmt: skip
    answer = post(server, "txt2img", body)
    warnings = json.loads(answer.json()["info"])["warnings"]
    for beginning in beginnings.values():
        assert sum(sentence.startswith(beginning) for sentence in warnings) == 1, beginning
        assert beginning in answer.headers["x-diffserve-warnings"]
    start = {"init_images": [in_base64(picture(64, 64))], "prompt": "a cat <hypernet:a:1>", "steps": 2}
    repainted = json.loads(post(server, "img2img", start).json()["info"])["warnings"]
    assert any(sentence.startswith(beginnings["prompt"]) for sentence in repainted)
    for syntax, number in (("a1111", 1), ("plain", 0)):
        painted = server.paint("a cat <hypernet:a:1>", prompt_syntax=syntax)
        sentences = [sentence for sentence in painted.json()["warnings"] if sentence.startswith(beginnings["prompt"])]
        assert len(sentences) == number
        assert (beginnings["prompt"] in painted.headers.get("x-diffserve-warnings", "")) == bool(number)
