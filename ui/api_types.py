"""Types of the page's named endpoints, as ``gradio_client`` and the page's ``/info`` show them.

Gradio derives them from the components. That is wrong where a text field holds an optional number, and where the
choices are known only after the server has loaded its models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from diffserve.api.fields import FORM_FIELDS, REQUEST_FIELDS
from ui.server import Models

INTEGERS: Final = ("steps", "seed", *(name for name in FORM_FIELDS if REQUEST_FIELDS[name].type is int))
NUMBERS: Final = (
    *("guidance", "strength", "control_scale"),
    *(name for name in FORM_FIELDS if REQUEST_FIELDS[name].type is float),
)
TEXT_ENDPOINTS: Final = {"/experiment": ("steps",), "/experiment_estimate": ("steps",)}
"""Parameters that are text although another endpoint has a number of this name: several steps with commas."""

Type = dict[str, Any]


def correct_types(info: Any, models: Models | None) -> Any:
    """Correct gradio's description ``info`` of the endpoints, with choices from ``models`` if they are known."""
    choices = {} if models is None else _choices(models)
    for name, endpoint in info["named_endpoints"].items():
        for parameter in endpoint["parameters"]:
            _set_type(parameter, parameter["parameter_name"], choices, TEXT_ENDPOINTS.get(name, ()))
        for value in endpoint["returns"]:
            _set_choices(value, value["label"].lower(), choices)
    return info


def _choices(models: Models) -> Mapping[str, Sequence[str]]:
    """Return the choices of each field that depends on the models, of all models together."""
    images = [models.image, *models.other_models.values()]
    samplers = list(dict.fromkeys(choice.name for image in images for choice in image.samplers))
    controls = list(dict.fromkeys(name for image in images for name in image.controlnets))
    return {
        "sampler": ["", *samplers],
        "samplers": samplers,
        "model": ["", *models.names],
        "control": ["", *controls],
        "controlnet": ["", *controls],
    }


def _set_type(parameter: Type, name: str, choices: Mapping[str, Sequence[str]], texts: Sequence[str]) -> None:
    if name in INTEGERS and name not in texts:
        _set_number(parameter, "integer", "int | None")
    elif name in NUMBERS:
        _set_number(parameter, "number", "float | None")
    elif name == "count":
        parameter["type"] = {"type": "integer"}
        parameter["python_type"]["type"] = "int"
    else:
        _set_choices(parameter, name, choices)


def _set_number(parameter: Type, kind: str, python_type: str) -> None:
    """Describe a number that may be left out; gradio would require a value for an empty number field."""
    parameter["type"] = {"anyOf": [{"type": kind}, {"type": "null"}]}
    parameter["python_type"]["type"] = python_type
    parameter["component"] = "Number"
    if not parameter["parameter_has_default"] or parameter["parameter_default"] == "":
        parameter |= {"parameter_has_default": True, "parameter_default": None}


def _set_choices(value: Type, name: str, choices: Mapping[str, Sequence[str]]) -> None:
    names = choices.get(name)
    if names is None:
        return
    literal = f"Literal[{', '.join(map(repr, names))}]"
    enum = {"type": "string", "enum": list(names)}
    is_list = value["type"].get("type") == "array"
    value["type"] = {"type": "array", "items": enum} if is_list else enum
    value["python_type"]["type"] = f"list[{literal}]" if is_list else literal
