"""A1111's ControlNet extension: listings, control maps and the fields of a unit."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Picture
from diffserve.media.canny import edge_map
from diffserve.media.images import decode_image, encode_image, resize, stretch
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.service.a1111.controlnets import UNIT_FIELDS, controlnets_of, ignored_in_units
from diffserve.service.a1111.schemas import Img2ImgBody, Txt2ImgBody
from tests.engine.controlnets import control_map, save_controlnet
from tests.service.server import RunningServer, running_server
from tests.service.test_a1111 import pixels_of, post

DEFAULT_UNIT: Final[dict[str, Any]] = {
    "enabled": True, "module": "none", "model": "edges", "weight": 1.0, "image": "aGk=", "resize_mode": 1,
    "low_vram": False, "processor_res": -1, "threshold_a": -1, "threshold_b": -1, "guidance_start": 0.0,
    "guidance_end": 1.0, "pixel_perfect": False, "control_mode": 0, "hr_option": "Both", "save_detected_map": True,
    "advanced_weighting": None, "mask": None, "mask_image": None, "effective_region_mask": None, "loopback": False,
    "input_mode": "simple", "ipadapter_input": None, "inpaint_crop_input_image": True,
}  # fmt: skip
"""A unit of the extension with its defaults."""


def in_base64(image: Picture) -> str:
    return base64.b64encode(encode_image(image)).decode()


def body_of(*units: dict[str, Any], **fields: Any) -> dict[str, Any]:
    scripts = {"ControlNet": {"args": list(units)}}
    size = {"steps": 2, "width": 64, "height": 64, "seed": 3, "sampler_name": "DDIM"}
    return {"prompt": "a cat", **size, "alwayson_scripts": scripts} | fields


def warnings_for(fields: dict[str, Any], **body: Any) -> list[str]:
    return ignored_in_units(Txt2ImgBody.model_validate(body_of(DEFAULT_UNIT | fields, **body)))


@pytest.mark.parametrize("enable_hr", [False, True])
def test_unit_of_defaults_causes_no_warning(enable_hr: bool) -> None:
    assert warnings_for({}, enable_hr=enable_hr) == []
    written = {"control_mode": "Balanced", "resize_mode": "Crop and Resize", "processor_res": 512, "threshold_a": 64}
    assert warnings_for(written, enable_hr=enable_hr) == []
    assert warnings_for({"module": "canny", "processor_res": 512, "threshold_a": 64, "threshold_b": 99}) == []
    assert warnings_for({"enabled": False, "control_mode": 2}) == []


@pytest.mark.parametrize("units", ["x", [5, None, "x"], {"model": "x"}])
def test_units_that_are_not_a_list_of_objects_are_reported(units: Any) -> None:
    body = Txt2ImgBody.model_validate({"prompt": "a fox", "alwayson_scripts": {"ControlNet": {"args": units}}})
    [sentence] = ignored_in_units(body)
    assert "must be a list of objects" in sentence


@pytest.mark.parametrize("name", [*UNIT_FIELDS, "hr_option"])
def test_ignored_unit_field_that_would_change_the_image_is_reported(name: str) -> None:
    for value in {"control_mode": (1, 2, "My prompt is more important")}.get(name, ("other",)):
        sentence = f"{name} of unit 0 of controlnet has no effect."
        assert warnings_for({name: value}, enable_hr=True) == [sentence]


def test_values_of_other_modules_and_units_without_a_model_are_reported() -> None:
    (sentence,) = warnings_for({"module": "hed", "processor_res": 512, "threshold_b": 3, "image": {"mask": "x"}})
    assert sentence == "processor_res, threshold_b, mask of unit 0 of controlnet has no effect."
    assert warnings_for({"module": "reference_only", "model": "None"}) == [
        "unit 0 of controlnet has no model and was ignored."
    ]
    (sentence,) = warnings_for({"resize_mode": "Squeeze"})
    assert sentence == 'resize_mode of unit 0 of controlnet is "Squeeze"; its image was cropped.'


@pytest.mark.parametrize(
    ("written", "mode"),
    [
        *((0, "stretch"), (1, "crop"), (2, "fill"), ("Just Resize", "stretch"), ("Crop and Resize", "crop")),
        *(("Resize and Fill", "fill"), ("Envelope (Outer Fit)", "fill"), ("Scale to Fit (Inner Fit)", "crop")),
        (None, "crop"),
    ],
)
def test_resize_modes_are_read_by_number_and_by_name(written: object, mode: str) -> None:
    (choice,) = controlnets_of(Txt2ImgBody.model_validate(body_of(DEFAULT_UNIT | {"resize_mode": written})))
    assert choice.resize == mode


def test_thresholds_and_resolution_are_read_for_canny() -> None:
    def read(**fields: Any) -> tuple[tuple[float, float], int]:
        unit = DEFAULT_UNIT | {"module": "canny"} | fields
        (choice,) = controlnets_of(Txt2ImgBody.model_validate(body_of(unit)))
        return choice.thresholds, choice.resolution

    assert read() == ((100.0, 200.0), 0)
    assert read(threshold_a=30, threshold_b="90.5", processor_res="256") == ((30.0, 90.5), 256)
    assert read(threshold_a=90, threshold_b=30) == ((30.0, 90.0), 0), "OpenCV exchanges them"
    assert read(processor_res=256, pixel_perfect=True) == ((100.0, 200.0), 0)
    for fields in ({"processor_res": 9999}, {"threshold_a": "many"}, {"processor_res": "inf"}, {"threshold_b": 9e9}):
        with pytest.raises(InvalidRequest, match="unit 0 of controlnet has a value that cannot be used"):
            read(**fields)


def test_unit_without_an_image_takes_the_image_of_img2img() -> None:
    unit = {"model": "edges [01ab]"}
    (choice,) = controlnets_of(Img2ImgBody.model_validate(body_of(unit, init_images=["c3RhcnQ="])))
    assert (choice.name, choice.image) == ("edges", "c3RhcnQ=")
    with pytest.raises(InvalidRequest, match="unit 0 of controlnet has a value that cannot be used; it needs"):
        controlnets_of(Txt2ImgBody.model_validate(body_of(unit)))


@pytest.fixture(scope="module")
def controlled(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("controlled")
    unet = import_quietly("diffusers", "UNet2DConditionModel").from_pretrained(str(tiny_model("sd15") / "unet"))
    save_controlnet(unet, folder / "controls" / "edges", 1)
    config = f'[model]\ndtype = "float32"\ncontrolnet_dir = {json.dumps(str(folder / "controls"))}\n'
    with running_server(tiny_model("sd15"), folder / "server", config=config) as server:
        server.wait_until_ready()
        yield server


@pytest.mark.slow
def test_clients_find_controlnets_and_preprocessors(controlled: RunningServer) -> None:
    def get(name: str) -> Any:
        answer = controlled.client.get(f"/controlnet/{name}")
        assert answer.status_code == 200
        return answer.json()

    assert get("version") == {"version": 2}
    assert get("model_list?update=true") == {"model_list": ["edges"]}
    assert get("module_list?alias_names=true")["module_list"] == ["none", "canny"]
    assert set(get("module_list")["module_detail"]) == {"none", "canny"}
    scripts = controlled.client.get("/sdapi/v1/scripts").json()
    assert scripts == {"txt2img": ["controlnet"], "img2img": ["controlnet"]}
    described = controlled.client.get("/sdapi/v1/script-info").json()
    assert [(script["name"], script["is_alwayson"], script["is_img2img"]) for script in described] == [
        ("controlnet", True, False), ("controlnet", True, True)
    ]  # fmt: skip
    assert get("settings") == {"control_net_unit_count": 4}
    assert get("control_types")["control_types"]["All"]["model_list"] == ["None", "edges"]


@pytest.mark.slow
def test_detect_makes_the_control_maps_that_images_are_generated_by(controlled: RunningServer) -> None:
    image = control_map(5, 96, 64)

    def detect(status: int = 200, **fields: Any) -> Any:
        body = {"controlnet_module": "canny", "controlnet_input_images": [in_base64(image)]} | fields
        answer = controlled.client.post("/controlnet/detect", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    answer = detect(controlnet_threshold_a=-1, controlnet_threshold_b=-1, controlnet_processor_res=-1)
    assert answer["info"] == "Success"
    (pixels,) = (decode_image(base64.b64decode(file)).array for file in answer["images"])
    assert np.array_equal(pixels, edge_map(image.array))
    answer = detect(controlnet_threshold_a=400, controlnet_threshold_b=900, controlnet_processor_res=128)
    pixels = decode_image(base64.b64decode(answer["images"][0])).array
    assert np.array_equal(pixels, edge_map(image.array, 400.0, 900.0, 128))
    assert pixels_of(detect(controlnet_module="none")["images"][0]) == image.data
    assert "use 'none' or 'canny'" in detect(400, controlnet_module="openpose")["detail"]
    assert "is not base64" in detect(400, controlnet_input_images=["!!"])["detail"]
    assert (
        "controlnet_input_images is missing" in controlled.client.post("/controlnet/detect", json={}).json()["detail"]
    )
    large = Picture.from_array(np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), dtype=np.uint8))
    assert len(detect(controlnet_input_images=[in_base64(large)])["images"]) == 1, "a body of 4 MB"


@pytest.mark.slow
def test_units_behave_as_in_a1111(controlled: RunningServer) -> None:
    image = control_map(5, 96, 64)

    def paint(**fields: Any) -> tuple[bytes, str]:
        unit = {"model": "edges", "image": in_base64(image)} | fields
        answer = post(controlled, "txt2img", body_of(unit))
        assert answer.status_code == 200, answer.text
        info = json.loads(answer.json()["info"])
        assert info["warnings"] == []
        return pixels_of(answer.json()["images"][0]), info["infotexts"][0]

    pictures = set()
    for mode, label, expected in (
        (0, "Just Resize", stretch(image, 64, 64)),
        (1, "Crop and Resize", resize(image, 64, 64)),
        (2, "Resize and Fill", resize(image, 64, 64, is_padded=True)),
    ):
        painted, infotext = paint(resize_mode=mode)
        assert painted == paint(image=in_base64(expected))[0]
        assert f"Resize Mode: {label}" in infotext
        pictures.add(painted)
    assert len(pictures) == 3
    plain, infotext = paint(module="canny", resize_mode=1)
    assert "Threshold A" not in infotext
    assert "Processor Res" not in infotext
    for fields, thresholds, resolution in (
        ({"threshold_a": 500, "threshold_b": 900}, (500.0, 900.0), 0),
        ({"processor_res": 128}, (100.0, 200.0), 128),
    ):
        painted, infotext = paint(module="canny", **fields)
        edges = Picture.from_array(edge_map(resize(image, 64, 64).array, *thresholds, resolution))
        assert painted == paint(image=in_base64(edges))[0] != plain
        names = {"threshold_a": "Threshold A", "threshold_b": "Threshold B", "processor_res": "Processor Res"}
        assert all(f"{names[name]}: {value}" in infotext for name, value in fields.items())


@pytest.mark.slow
def test_ignored_unit_fields_are_in_the_header_and_the_info(controlled: RunningServer) -> None:
    unit = {"model": "edges", "image": in_base64(control_map(5)), "control_mode": 2, "mask": "aGk="}
    answer = post(controlled, "txt2img", body_of(unit))
    sentence = "control_mode, mask of unit 0 of controlnet has no effect."
    assert json.loads(answer.json()["info"])["warnings"] == [sentence]
    assert sentence in answer.headers["x-diffserve-warnings"]


@pytest.mark.slow
def test_openai_api_accepts_resize_modes_thresholds_and_a_resolution(controlled: RunningServer) -> None:
    image = control_map(5, 96, 64)
    choice = {"name": "edges", "image": in_base64(image), "preprocessor": "canny"}
    entry = choice | {"resize": "crop", "thresholds": [500, 900], "resolution": 128}
    painted = controlled.paint("a cat", size="64x64", controlnets=[entry])
    assert painted.status_code == 200, painted.text
    (control,) = painted.json()["controlnets"]
    assert (control["resize"], control["thresholds"], control["resolution"]) == ("crop", [500.0, 900.0], 128)
    for wrong, part in (
        ({"resize": "squeeze"}, "resize"),
        ({"resize": True}, "give one of that aspect ratio: resizing keeps it"),
        ({"resize": "fill", "thresholds": [9, 1]}, "the thresholds of ControlNet 'edges' are 9 and 1"),
        ({"resize": "fill", "resolution": 9999}, "resolution"),
    ):
        answer = controlled.paint("a cat", size="64x64", controlnets=[choice | wrong])
        assert answer.status_code == 400
        assert part in answer.json()["error"]["message"]
