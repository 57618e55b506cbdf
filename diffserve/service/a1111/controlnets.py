"""A1111's ControlNet extension: units of a request, preprocessors, and control maps without image generation."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Picture
from diffserve.media.canny import STRONG, WEAK, edge_map
from diffserve.media.decoders import ImageDecoder, shared_decoders
from diffserve.media.images import encode_image
from diffserve.models.controlnets import (
    CANNY,
    CANNY_THRESHOLDS,
    MAX_RESOLUTION,
    MAX_THRESHOLD,
    PASSED_THROUGH,
    ResizeMode,
)
from diffserve.service.a1111.schemas import CONTROLNET, DetectBody, Img2ImgBody, Neutral, Txt2ImgBody, has_effect
from diffserve.service.http.addresses import Clients
from diffserve.service.http.bodies import show
from diffserve.service.images.fetching import Fetcher
from diffserve.service.images.inputs import image_bytes
from diffserve.service.images.schemas import ControlNetChoice, ReferenceChoice
from diffserve.service.lifecycle import read_body, while_connected

API_VERSION: Final = 2
RESIZE_MODES: Final[dict[str, ResizeMode]] = {
    **dict.fromkeys(("0", "just resize"), "stretch"),
    **dict.fromkeys(("1", "crop and resize", "scale to fit (inner fit)", "inner fit", "none"), "crop"),
    **dict.fromkeys(("2", "resize and fill", "envelope (outer fit)", "outer fit"), "fill"),
}
"""Resize modes of control images, by A1111's names and numbers."""

UNIT_FIELDS: Final[dict[str, Neutral]] = {
    "control_mode": (0, "balanced"),
    "guessmode": (False,),
    "mask": (),
    "mask_image": (),
    "effective_region_mask": (),
    "advanced_weighting": (),
    "ipadapter_input": (),
    "input_mode": ("simple",),
    "loopback": (False,),
}
"""Unsupported fields of a unit, with the values that have no effect in A1111."""

IP_ADAPTER: Final = "ip-adapter-auto"
"""A1111's module of IP-Adapters, which chooses the image encoder by the file."""

MODULES: Final[dict[str, dict[str, Any]]] = {
    PASSED_THROUGH: {"model_free": False, "sliders": []},
    CANNY: {
        "model_free": False,
        "sliders": [
            {"name": "Resolution", "value": 512, "min": 64, "max": MAX_RESOLUTION},
            {"name": "Low Threshold", "value": WEAK, "min": 0, "max": MAX_THRESHOLD},
            {"name": "High Threshold", "value": STRONG, "min": 0, "max": MAX_THRESHOLD},
        ],
    },
}
"""Preprocessors that make control maps."""


def modules(adapters: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the modules of units, for a server with these IP-``adapters``."""
    return MODULES | ({IP_ADAPTER: {"model_free": False, "sliders": []}} if adapters else {})


def module_list(adapters: Sequence[str]) -> dict[str, Any]:
    """Return the names and details of the modules of units."""
    return {"module_list": list(modules(adapters)), "module_detail": modules(adapters)}


def control_types(models: Sequence[str], adapters: Sequence[str]) -> dict[str, Any]:
    """Return the ControlNets ``models``, IP-``adapters`` and modules as the types "All" and "IP-Adapter"."""
    content = {"module_list": list(modules(adapters)), "model_list": ["None", *models, *adapters]}
    types = {"All": content | {"default_option": PASSED_THROUGH, "default_model": "None"}}
    if adapters:
        content = {"module_list": [IP_ADAPTER], "model_list": ["None", *adapters]}
        types["IP-Adapter"] = content | {"default_option": IP_ADAPTER, "default_model": adapters[0]}
    return {"control_types": types}


def thresholds_of(first: float | None, second: float | None) -> tuple[float, float]:
    """Return the thresholds of canny; ``None`` and negative numbers stand for its own."""
    weak, strong = (
        default if value is None or value < 0 else value
        for value, default in zip((first, second), CANNY_THRESHOLDS, strict=True)
    )
    return min(weak, strong), max(weak, strong)


def controlnets_of(body: Txt2ImgBody) -> list[ControlNetChoice]:
    """Return the ControlNets that ``body`` asks for. Raises InvalidRequest for a unit with a value out of bounds."""
    choices = []
    for place, unit in _active_units(body):
        if not _has_model(unit) or is_reference(unit):
            continue
        module = PASSED_THROUGH if unit.get("module") in (None, "", "None") else unit["module"]
        values = {
            **_common_values(unit, body),
            "preprocessor": module,
            "resize": RESIZE_MODES.get(_lower(unit.get("resize_mode")), "crop"),
        }
        try:
            if module == CANNY:
                values["thresholds"] = thresholds_of(_number(unit, "threshold_a"), _number(unit, "threshold_b"))
                values["resolution"] = (
                    0 if unit.get("pixel_perfect") else max(0, int(_number(unit, "processor_res") or 0))
                )
            choices.append(ControlNetChoice.model_validate({n: v for n, v in values.items() if v is not None}))
        except (ValueError, TypeError, OverflowError):
            message = (
                f"unit {place} of controlnet has a value that cannot be used; it needs model, image, weight 0 to 2, "
                f"guidance 0 to 1, processor_res to {MAX_RESOLUTION}, thresholds to {MAX_THRESHOLD:g}."
            )
            raise InvalidRequest(message, param="alwayson_scripts") from None
    return choices


def references_of(body: Txt2ImgBody) -> list[ReferenceChoice]:
    """Return the references of the IP-Adapter units of ``body``. Raises InvalidRequest as ``controlnets_of``."""
    choices = []
    for place, unit in _active_units(body):
        if not _has_model(unit) or not is_reference(unit):
            continue
        values = {name: value for name, value in _common_values(unit, body).items() if value is not None}
        try:
            choices.append(ReferenceChoice.model_validate(values))
        except ValueError:
            message = (
                f"unit {place} of controlnet has a value that cannot be used; an IP-Adapter needs model, image, weight "
                "0 to 2, guidance 0 to 1."
            )
            raise InvalidRequest(message, param="alwayson_scripts") from None
    return choices


def is_reference(unit: dict[str, Any]) -> bool:
    """Return whether ``unit`` is for an IP-Adapter, by the name of its module or of its model."""
    module, model = _lower(unit.get("module")), _lower(unit.get("model")).replace("_", "-").rpartition("/")[2]
    return module.startswith("ip-adapter") or model.startswith("ip-adapter")


def _common_values(unit: dict[str, Any], body: Txt2ImgBody) -> dict[str, Any]:
    """Return the fields that ControlNets and references have in common."""
    image = unit.get("image") or unit.get("input_image")
    if isinstance(image, dict):
        image = image.get("image")
    if not image and isinstance(body, Img2ImgBody) and body.init_images:
        image = body.init_images[0]
    return {
        "name": str(unit["model"]).partition(" [")[0],
        "image": image,
        "scale": unit.get("weight"),
        "start": unit.get("guidance_start"),
        "end": unit.get("guidance_end"),
    }


def ignored_in_units(body: Txt2ImgBody) -> list[str]:
    """Return a sentence for everything in the units of ``body`` that A1111 applies and this server does not."""
    sentences = []
    units = _units(body)
    if not isinstance(units, list | None) or not all(isinstance(unit, dict) for unit in units or ()):
        sentences.append("args of controlnet must be a list of objects; other values were ignored.")
    for place, unit in _active_units(body):
        if not _has_model(unit):
            if unit.get("module") not in (None, "", "None", "none"):
                sentences.append(f"unit {place} of controlnet has no model and was ignored.")
            continue
        fields = UNIT_FIELDS | ({"hr_option": ("both", 0)} if body.enable_hr else {})
        if unit.get("module") not in (None, "", "None", PASSED_THROUGH, CANNY) and not is_reference(unit):
            fields |= dict.fromkeys(("processor_res", "threshold_a", "threshold_b"), (-1,))
        names = [name for name, neutral in fields.items() if has_effect(unit.get(name), neutral)]
        image = unit.get("image") or unit.get("input_image")
        if isinstance(image, dict) and image.get("mask"):
            names.append("mask")
        if names:
            sentences.append(f"{', '.join(dict.fromkeys(names))} of unit {place} of controlnet has no effect.")
        mode = None if is_reference(unit) else unit.get("resize_mode")
        if mode is not None and _lower(mode) not in RESIZE_MODES:
            sentences.append(f"resize_mode of unit {place} of controlnet is {show(mode)}; its image was cropped.")
    return sentences


def _active_units(body: Txt2ImgBody) -> list[tuple[int, dict[str, Any]]]:
    """Return the units that are switched on, each with its place."""
    units = _units(body)
    places = enumerate(units if isinstance(units, list) else ())
    return [(place, unit) for place, unit in places if isinstance(unit, dict) and unit.get("enabled") is not False]


def _units(body: Txt2ImgBody) -> Any:
    """Return the value in the place of the list of units, which may be of any type."""
    scripts = (body.alwayson_scripts or {}).items()
    script = next((script for name, script in scripts if name.lower() == CONTROLNET), None)
    return script.get("args") if isinstance(script, dict) else None


def _has_model(unit: dict[str, Any]) -> bool:
    return unit.get("model") not in (None, "", "None")


def _number(unit: dict[str, Any], name: str) -> float | None:
    """Return a number of ``unit``, which may be written as text. Raises ValueError, TypeError."""
    value = unit.get(name)
    return None if value in (None, "") else float(value)


def _lower(value: object) -> str:
    return str(value).strip().lower()


async def detect(request: Request, fetcher: Fetcher, clients: Clients) -> Response:
    """Answer ``POST /controlnet/detect``: a control map for each picture."""
    body = await read_body(request, DetectBody)
    module = body.controlnet_module or PASSED_THROUGH
    message = f"controlnet_module is {show(module)}; use {' or '.join(repr(name) for name in MODULES)}."
    check(module in MODULES, message, "controlnet_module")
    await fetcher.fill(body)
    thresholds = thresholds_of(body.controlnet_threshold_a, body.controlnet_threshold_b)
    resolution = max(0, body.controlnet_processor_res or 0)

    def read(decoder: ImageDecoder) -> list[str]:
        maps = []
        for image in body.controlnet_input_images:
            name = "controlnet_input_images"
            picture = decoder.decode_image(image_bytes(image, name), name=name)
            if module == CANNY:
                picture = Picture.from_array(edge_map(picture.array, *thresholds, resolution))
            maps.append(base64.b64encode(encode_image(picture)).decode("ascii"))
        return maps

    with clients.name_of(request) as client:
        maps = await while_connected(request, shared_decoders().run(client, read))
    return JSONResponse({"images": maps, "info": "Success"})
