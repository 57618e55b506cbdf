"""A1111's API with the ``webuiapi`` client over a real socket, and what other clients send and need."""

from __future__ import annotations

import base64
import json
import re
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import webuiapi
from PIL import Image, PngImagePlugin

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Picture
from diffserve.media.images import decode_image, read_infotext
from diffserve.media.start_picture import StartPicture
from diffserve.service.a1111 import conversion
from diffserve.service.a1111.conversion import convert_body
from diffserve.service.a1111.schemas import Img2ImgBody, Txt2ImgBody
from diffserve.service.a1111.styles import read_styles, with_styles
from tests.service.server import RunningServer
from tests.service.test_edits import file_of, in_base64, picture
from ui.create.parameters import form_of


def post(server: RunningServer, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}/sdapi/v1/{path}", json=body, headers=headers, timeout=60)


@pytest.mark.slow
def test_webuiapi_generates_repaints_enlarges_and_reads(server: RunningServer) -> None:
    port = int(server.url.rpartition(":")[2])
    api = webuiapi.WebUIApi(host="127.0.0.1", port=port, sampler="Euler a", steps=2)
    painted = api.txt2img(prompt="a red fox", negative_prompt="dog", seed=5, width=64, height=64, cfg_scale=3, n_iter=2)
    assert [image.size for image in painted.images] == [(64, 64)] * 2
    assert painted.info["all_seeds"] == [5, 6]
    assert "Sampler: Euler a" in painted.info["infotexts"][0]
    again = post(server, "txt2img", {"infotext": painted.info["infotexts"][1]}).json()
    assert json.loads(again["info"])["seed"] == 6
    infotext = json.loads(again["info"])["infotexts"][0]
    assert post(server, "txt2img", {"infotext": infotext}).json()["images"] == again["images"]
    full_image = Image.fromarray(picture(96, 64))
    mask = np.zeros((64, 96), np.uint8)
    mask[16:48, 32:64] = 255
    repainted = api.img2img(
        images=[full_image], prompt="a red fox", seed=5, width=64, height=64, mask_image=Image.fromarray(mask), steps=2,
        inpainting_fill=1, denoising_strength=1.0, mask_blur=2,
    )  # fmt: skip
    after = np.asarray(repainted.image)
    assert after.shape == (64, 96, 3), "the masked part alone was painted at 64x64"
    assert np.array_equal(after[mask == 0], np.asarray(full_image)[mask == 0])
    assert not np.array_equal(after[mask > 0], np.asarray(full_image)[mask > 0])
    large = api.txt2img(
        prompt="a red fox", seed=5, width=64, height=64, steps=2, enable_hr=True, hr_scale=1.5, denoising_strength=0.5,
        hr_upscaler="Latent", batch_size=2,
    )  # fmt: skip
    assert [image.size for image in large.images] == [(96, 96)] * 2
    pattern = "Size: 64x64, .*Denoising strength: 0.5, .*Hires upscale: 1.5, Hires steps: 2, Hires upscaler: Lanczos"
    assert re.search(pattern, large.info["infotexts"][1])
    again = post(server, "txt2img", {"infotext": large.info["infotexts"][1]}).json()["images"]
    assert np.array_equal(decode_image(base64.b64decode(again[0])).array, np.asarray(large.images[1]))
    assert form_of(large.info["infotexts"][1], None).strength is None, "the first pass begins from noise"
    infotext = api.png_info(painted.image)
    assert "Steps: 2" in infotext.info
    assert {"Euler a", "DPM++ 2M"} <= {sampler["name"] for sampler in api.get_samplers()}
    assert api.util_get_model_names() == [api.get_options()["sd_model_checkpoint"]]
    api.util_set_model(api.util_get_model_names()[0])
    assert api.get_progress()["state"]["job_count"] == 0
    for listed in (api.get_upscalers, api.get_prompt_styles, api.get_loras, api.get_embeddings, api.get_cmd_flags):
        listed()
    api.refresh_checkpoints()


@pytest.mark.slow
def test_what_sillytavern_and_librechat_send_gives_what_they_read(server: RunningServer) -> None:
    sent = {
        "url": "http://x", "auth": ":", "prompt": "a red fox", "negative_prompt": "", "sampler_name": "DPM++ 2M Karras",
        "scheduler": "Automatic", "steps": 2, "cfg_scale": 4.5, "width": 64, "height": 64, "restore_faces": False,
        "enable_hr": False, "hr_upscaler": "Latent", "hr_scale": 2, "denoising_strength": 0.7,
        "hr_second_pass_steps": 0, "seed": 7, "clip_skip": 1, "save_images": True, "send_images": True,
        "override_settings": {"CLIP_stop_at_last_layers": 1, "sd_vae": "Automatic", "samples_save": False, "any": "/x"},
        "alwayson_scripts": {"ADetailer": {"args": [True]}}, "eta": None, "subseed": -1,
    }  # fmt: skip
    answer = post(server, "txt2img", sent, Authorization="Basic Og==")
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    info = json.loads(reply["info"])
    assert (info["seed"], info["width"], info["sampler_name"]) == (7, 64, "DPM++ 2M")
    assert info["extra_generation_params"] == {"Schedule type": "Karras"}
    assert read_infotext(base64.b64decode(reply["images"][0])) == info["infotexts"][0]
    assert "ADetailer" in answer.headers["x-diffserve-warnings"]
    assert reply["parameters"]["cfg_scale"] == 4.5
    options = httpx.get(f"{server.url}/sdapi/v1/options").json()
    assert post(server, "options", options).status_code == 200, "Open WebUI sends all of them back"
    assert post(server, "options", {"sd_model_checkpoint": ""}).status_code == 200, "takes it back"


@pytest.mark.slow
def test_progress_and_interruption_are_separate_per_client(server: RunningServer) -> None:
    mine, other_credentials = {"Authorization": "Basic bWluZTo="}, {"Authorization": "Basic b3RoZXJzOg=="}
    sent = {"prompt": "a red fox", "steps": 900, "width": 64, "height": 64, "force_task_id": "task(1)", "seed": 1}

    def state(headers: dict[str, str]) -> dict[str, Any]:
        return dict(httpx.get(f"{server.url}/sdapi/v1/progress", headers=headers).json())

    def task(headers: dict[str, str]) -> dict[str, Any]:
        body = {"id_task": "task(1)", "id_live_preview": -1}
        return dict(httpx.post(f"{server.url}/internal/progress", json=body, headers=headers).json())

    with ThreadPoolExecutor(1) as pool:
        painting = pool.submit(post, server, "txt2img", sent, **mine)
        while not (progress := state(mine))["progress"]:
            assert not painting.done(), painting.result().text
        assert 0.0 < progress["progress"] < 1.0
        assert (progress["state"]["job_count"], progress["state"]["sampling_steps"]) == (1, 900)
        assert task(mine)["active"]
        assert state(other_credentials)["state"]["job_count"] == 0
        assert not task(other_credentials)["active"]
        post(server, "interrupt", {}, **other_credentials)
        post(server, "skip", {}, **other_credentials)
        assert not painting.done()
        assert httpx.get(f"{server.url}/internal/pending-tasks", headers=mine).json()["tasks"] == ["task(1)"]
        post(server, "interrupt", {}, **mine)
        answer = painting.result(timeout=60)
    assert answer.status_code == 200
    [unfinished] = answer.json()["images"]
    assert decode_image(base64.b64decode(unfinished)).array.shape == (64, 64, 3)
    info = json.loads(answer.json()["info"])
    [steps] = re.findall(r"Interrupted after: (\d+)", info["infotexts"][0])
    assert 0 < int(steps) < 900
    assert f"interrupted after {steps} of 900 steps" in answer.headers["x-diffserve-warnings"]
    assert task(mine)["completed"]
    assert not task(other_credentials)["completed"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupt", "skip"])
def test_interrupted_task_answers_with_the_unfinished_image_of_the_pass_it_is_in(
    server: RunningServer, how: str
) -> None:
    first = {"prompt": "a red fox", "steps": 2, "width": 64, "height": 64, "seed": 1}
    second = {"enable_hr": True, "hr_scale": 1.5, "hr_second_pass_steps": 900, "denoising_strength": 1.0}
    with ThreadPoolExecutor(1) as pool:
        painting = pool.submit(post, server, "txt2img", first | second)
        while server.client.get("/sdapi/v1/progress").json()["progress"] <= 0.01:
            assert not painting.done(), painting.result().text
        post(server, how, {})
        answer = painting.result(timeout=60)
    [unfinished] = answer.json()["images"]
    assert decode_image(base64.b64decode(unfinished)).array.shape == (96, 96, 3)


@pytest.mark.slow
def test_task_that_is_interrupted_before_its_first_step_answers_without_images(server: RunningServer) -> None:
    sent = {"prompt": "a red fox", "steps": 900, "width": 64, "height": 64, "seed": 1}
    with ThreadPoolExecutor(12) as pool:
        painting = [pool.submit(post, server, "txt2img", sent | {"seed": seed}) for seed in range(12)]
        server.wait_for_requests(12)
        post(server, "interrupt", {})
        answers = [task.result(timeout=60) for task in painting]
    assert {answer.status_code for answer in answers} == {200}
    assert {len(answer.json()["images"]) for answer in answers} <= {0, 1}


@pytest.mark.slow
def test_images_are_varied_by_a_second_seed_and_their_text_generates_them_again(server: RunningServer) -> None:
    sent = {
        "prompt": "a red fox", "seed": 7, "subseed": 20, "subseed_strength": 0.3, "steps": 2, "width": 64,
        "height": 64, "batch_size": 2, "sampler_name": "DDIM",
    }  # fmt: skip
    reply = post(server, "txt2img", sent).json()
    info = json.loads(reply["info"])
    assert (info["seed"], info["all_seeds"]) == (7, [7, 7])
    assert (info["subseed"], info["all_subseeds"], info["subseed_strength"]) == (20, [20, 21], 0.3)
    assert "Variation seed: 21, Variation seed strength: 0.3" in info["infotexts"][1]
    again = post(server, "txt2img", {"infotext": info["infotexts"][1]}).json()["images"]
    assert pixels_of(again[0]) == pixels_of(reply["images"][1]) != pixels_of(reply["images"][0])
    large = sent | {"enable_hr": True, "hr_scale": 1.5, "denoising_strength": 0.5}
    alone = large | {"subseed": 21, "batch_size": 1}
    both, second = (post(server, "txt2img", body).json() for body in (large, alone))
    assert pixels_of(both["images"][1]) == pixels_of(second["images"][0]), "the second pass is varied as the first is"
    for seed, text in zip((20, 21), json.loads(both["info"])["infotexts"], strict=True):
        assert f"Variation seed: {seed}," in text
    drawn = json.loads(post(server, "txt2img", sent | {"subseed": -1}).json()["info"])
    assert drawn["subseed"] != 20
    assert drawn["all_subseeds"] == [drawn["subseed"], drawn["subseed"] + 1]
    plain = json.loads(post(server, "txt2img", sent | {"subseed_strength": 0, "subseed": 1.5}).json()["info"])
    assert (plain["all_seeds"], plain["all_subseeds"], plain["subseed_strength"]) == ([7, 8], [-1, -1], 0)
    resized = post(server, "txt2img", sent | {"seed_resize_from_w": 32, "seed_resize_from_h": 32})
    assert "seed_resize_from_w has no effect." in resized.headers["x-diffserve-warnings"]


def pixels_of(image: str) -> bytes:
    return decode_image(base64.b64decode(image)).data


SMALL = in_base64(picture(64, 64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("txt2img", {"prompt": ""}, "the prompt is empty; describe the image."),
        ("txt2img", {"prompt": "a fox", "steps": "many"}, 'steps is "many"; '),
        ("txt2img", {"prompt": "a fox", "sampler_name": "Magic"}, "Magic"),
        ("txt2img", {"prompt": "a fox", "subseed": 3, "subseed_strength": 1.2}, "subseed_strength is 1.2"),
        ("txt2img", {"prompt": "a fox", "subseed": -2, "subseed_strength": 0.2}, "subseed is -2; give a whole number"),
        (
            "txt2img",
            {"prompt": "a fox", "subseed": [1], "subseed_strength": 0.2},
            "subseed is [1]; give a whole number",
        ),
        ("txt2img", {"prompt": "a fox", "sampler_name": "DPM++ SDE Karras"}, "closest supported one is 'dpmpp_2m_sde'"),
        ("txt2img", {"prompt": "a fox", "batch_size": 4, "n_iter": 4}, "batch_size times n_iter is 16; at most 10"),
        ("txt2img", {"prompt": "a fox", "styles": ["oil"]}, 'there is no style "oil"; there are none'),
        ("txt2img", {"prompt": "a fox", "width": 9, "height": 9}, "size is 9x9; each side must lie between"),
        ("txt2img", {"prompt": "a fox", "infotext": "Steps: x, Sampler: y, Seed: z"}, "a value in the infotext cannot"),
        ("txt2img", {"prompt": "a fox", "override_settings": {"sd_model_checkpoint": "x"}}, 'there is no model "x"'),
        ("txt2img", {"prompt": "a fox", "enable_hr": True, "hr_resize_x": 96}, "hr_resize_x and hr_resize_y are given"),
        (
            "txt2img",
            {"prompt": "a", "alwayson_scripts": {"ControlNet": {"args": [{"model": "e"}]}}},
            "unit 0 of",
        ),
        (
            "txt2img",
            {"prompt": "a", "alwayson_scripts": {"controlnet": {"args": [{"model": "edges", "image": SMALL}]}}},
            "there is no ControlNet 'edges'",
        ),
        ("img2img", {"prompt": "a fox"}, "init_images is missing; give an image in base64."),
        ("img2img", {"prompt": "a fox", "init_images": ["http://x/a.png"]}, "init_images[0] is a URL"),
        ("img2img", {"prompt": "a fox", "init_images": [SMALL], "mask": "!!"}, "mask is not base64"),
        ("png-info", {"image": "!!"}, "image is not base64"),
        ("options", {"sd_model_checkpoint": "../x"}, 'there is no model "../x"'),
        *(
            ("txt2img", {"prompt": "a", "override_settings": {name: value}}, f"override_settings has {name}; requests")
            for name, value in (
                ("outdir_samples", "../../x"),
                ("samples_save", True),
                ("script_name", "x"),
                ("lora_dir", "/"),
                ("alwayson_scripts", {"a": {}}),
                ("directories_filename_pattern", "[x]"),
            )
        ),  # row 69 of the bad input
        ("txt2img", {"prompt": "a", "override_settings": {"sd_model_checkpoint": "../../x"}}, "there is no model"),
        ("txt2img", {"prompt": "a", "script_name": "X/Y/Z plot"}, 'script_name is "X/Y/Z plot"'),
        ("txt2img", {"prompt": "a", "scheduler": "KL Optimal"}, "the nearest is Automatic, and the known ones are"),
        ("txt2img", {"prompt": "a", "scheduler": "align_your_steps_GITS"}, "the nearest is Exponential"),
        ("txt2img", {"prompt": "a", "sampler_name": "Euler", "scheduler": "Karas"}, "the nearest is Karras"),
        ("img2img", {"prompt": "a", "init_images": [in_base64(picture(1, 4000))]}, "init_images is 1x4000; each side"),
        ("options", {"CLIP_stop_at_last_layers": -5}, "CLIP_stop_at_last_layers is -5"),
        ("txt2img", {"prompt": "a", "steps": "x"}, 'steps is "x"; it must be a whole number.'),
        ("txt2img", {"prompt": "a", "steps": 2.5}, "steps is 2.5; it must be a whole number."),
        ("txt2img", {"prompt": "a", "cfg_scale": "x"}, 'cfg_scale is "x"; it must be a number.'),
        ("txt2img", {"prompt": "a", "send_images": "x"}, 'send_images is "x"; it must be true or false.'),
    ],
)
def test_bad_input_is_one_sentence_in_a1111s_shape(
    server: RunningServer, path: str, body: dict[str, Any], message: str
) -> None:
    answer = post(server, path, body)
    assert answer.status_code in (400, 404, 422)
    reply = answer.json()
    assert message in reply["detail"]
    assert (reply["error"], reply["errors"]) == ("HTTPException", reply["detail"])
    assert {"error", "detail", "body", "errors", "code"} == reply.keys()


@pytest.mark.slow
def test_infotext_with_excessive_or_unsafe_values_is_read_partially(server: RunningServer) -> None:
    """Check row 72 of the bad input."""
    pairs = "Steps: 1, Sampler: Euler, Seed: 1"
    for text in (
        "a" * (5 << 20) + f"\n{pairs}",
        f"<script>alert(1)</script>\n{pairs}",
        f"\u4f60 \u202e\x1b[2J\n{pairs}",
    ):
        chunks, file = PngImagePlugin.PngInfo(), BytesIO()
        chunks.add_itxt("parameters", text)
        Image.new("RGB", (8, 8)).save(file, "PNG", pnginfo=chunks)
        answer = post(server, "png-info", {"image": base64.b64encode(file.getvalue()).decode()})
        reply = answer.json()
        assert answer.headers["content-type"] == "application/json"
        assert reply["info"] == text or (reply["info"][:8000] == text[:8000] and len(answer.content) < 20_000)
        assert (reply["parameters"]["Seed"], reply["parameters"]["Prompt"][0]) == ("1", text[0])


def test_styles_are_read_as_a1111_writes_them(tmp_path: Path) -> None:
    text = 'name,prompt,negative_prompt\r\noil,"oil painting of {prompt}, brushed",photo\r\nlate,"at dusk",\r\n'
    (tmp_path / "styles.csv").write_text(text, encoding="utf-8-sig")
    styles = read_styles(tmp_path)
    assert with_styles("a fox", "", ["oil", "late", "None"], styles) == (
        "oil painting of a fox, brushed, at dusk",
        "photo",
    )
    assert read_styles(tmp_path / "none") == []


def test_infotext_fills_what_a_request_leaves_out() -> None:
    text = "a fox\nNegative prompt: dog\nSteps: 9, Sampler: Euler a, Schedule type: Karras, Seed: 3, Size: 64x96"
    _, body = convert_body(Txt2ImgBody(infotext=text, steps=4, styles=[]), {"CLIP_stop_at_last_layers": 2}, [])
    assert (body.prompt, body.negative_prompt, body.num_inference_steps) == ("a fox", "dog", 4)
    assert (body.sampler, body.scheduler, body.seed, body.width, body.height) == ("Euler a", "Karras", 3, 64, 96)
    assert body.model_dump()["clip_skip"] == 2


@pytest.mark.parametrize(
    ("box", "aspect", "padding", "region"),
    [
        ((10, 20, 30, 30), 1.0, 0, (10, 15, 30, 35)),
        ((0, 0, 4, 4), 1.0, 8, (0, 0, 12, 12)),
        ((90, 40, 100, 64), 2.0, 0, (52, 40, 100, 64)),
        ((0, 0, 100, 64), 1.0, 32, (0, 0, 100, 64)),
    ],
)
def test_region_of_a_mask_grows_to_the_aspect_within_the_image(
    box: tuple[int, int, int, int], aspect: float, padding: int, region: tuple[int, int, int, int]
) -> None:
    mask = np.zeros((64, 100), np.uint8)
    mask[box[1] : box[3], box[0] : box[2]] = 255
    image = Picture.from_array(picture(100, 64))
    start = StartPicture(picture=image, mask=Picture.from_array(mask), feather_px=1.0).around_mask(aspect, padding)
    assert start.region == region
    painted = Picture.from_array(np.zeros((16, 16, 3), np.uint8))
    laid = start.lay_around(painted).array
    assert np.array_equal(laid[mask == 0], image.array[mask == 0])
    assert not laid[(box[1] + box[3]) // 2, (box[0] + box[2]) // 2].any() or min(box[2] - box[0], box[3] - box[1]) < 8
    assert decode_image(file_of(laid)).array.shape == (64, 100, 3)


def test_what_fills_the_mask_of_a_large_image_is_computed_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_px: list[int] = []
    average_colors = conversion._average_colors

    def spy(picture: Picture, mask: Picture) -> np.ndarray[Any, Any]:
        asked_px.append(max(picture.width_px, picture.height_px))
        return average_colors(picture, mask)

    monkeypatch.setattr(conversion, "_average_colors", spy)
    pixels, marked = np.zeros((1500, 2048, 3), np.uint8), np.zeros((1500, 2048), np.uint8)
    pixels[:, :1024], marked[700:800, 300:400] = (200, 40, 0), 255
    filled = conversion._fill_masked_area(Picture.from_array(pixels), Picture.from_array(marked)).array
    assert asked_px == [conversion.MOST_FILLED_PX]
    assert np.array_equal(filled[marked == 0], pixels[marked == 0])
    assert np.abs(filled.astype(int) - pixels).max() <= 20, "the colours from around"
    nothing = Img2ImgBody(init_images=[in_base64(pixels)], mask=in_base64(np.zeros_like(marked)))
    with pytest.raises(InvalidRequest, match="the mask selects no area to generate"):
        conversion.start_of(nothing, 64, 64)
    assert len(asked_px) == 1, "refused before anything is filled"


def test_a1111_settings_bound_the_noise_levels_and_0_means_the_default() -> None:
    settings = {"sigma_min": 0.1, "sigma_max": 0}
    _, body = convert_body(Txt2ImgBody(prompt="a fox", override_settings=settings), {}, [])
    fields = body.model_dump(exclude_none=True)
    assert fields["sigma_min"] == 0.1
    assert "sigma_max" not in fields
    with pytest.raises(InvalidRequest, match='sigma_min is "low"; give a number above 0') as refused:
        convert_body(Txt2ImgBody(prompt="a fox", override_settings={"sigma_min": "low"}), {}, [])
    assert refused.value.param == "override_settings.sigma_min"
