"""``diffserve list``: prints the names that requests can use, on this machine or on a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from rich.console import Console

from diffserve.cli.generate import note, open_engine
from diffserve.settings.config import Settings
from diffserve.settings.layers import PROFILES

Kind = Literal[
    "samplers", "models", "loras", "controlnets", "references", "upscalers", "embeddings", "wildcards", "styles"
]
REWRITER_STYLE: Final = "prompt style for rewrite --style"
FIELDS: Final[Mapping[str, tuple[str, str]]] = {
    "loras": ("loras", "refused_loras"),
    "controlnets": ("controlnets", "refused_controlnets"),
    "references": ("references", "refused_references"),
    "upscalers": ("upscalers", "refused_upscalers"),
    "embeddings": ("learnt_words", "refused_words"),
    "wildcards": ("wildcards", ""),
}
"""Capability fields with the usable names and the refused files ("": none), for each kind that belongs to a model."""


def run(kind: Kind, settings: Settings) -> int:
    """Print the names that are available on this machine."""
    match kind:
        case "samplers":
            from diffserve.runtime.loading.family import learned_samplers_of
            from schedulers import SAMPLERS

            _print({sampler.name: sampler.label for sampler in SAMPLERS.values()})
            learned = learned_samplers_of(settings.model.path, settings.model.sampler_dir).usable()
            _print({name: f"{sampler.num_rows} steps of {sampler.model}" for name, sampler in learned.items()})
        case "models":
            _print({name: "built in" if name.startswith("embedded") else "model settings" for name in PROFILES})
            _print({model.model_id: model.path for model in settings.models})
        case "wildcards":
            from diffserve.models.templates import Wildcards

            _print(dict.fromkeys(Wildcards(settings.model.wildcard_dir).names(), ""))
        case "styles":
            from diffserve.rewriting import style_names
            from diffserve.service.a1111.styles import FILE, read_styles

            _print(dict.fromkeys(style_names(), REWRITER_STYLE))
            folder = Path(settings.serve.data_dir).expanduser()
            _print({style.name: f"prompt style from {FILE}" for style in read_styles(folder)})
        case "upscalers":
            from diffserve.models.upscalers import UpscalerFolders

            folders = UpscalerFolders(settings.model.upscaler_dir)
            _print_of_model(kind, {"upscalers": folders.names(), "refused_upscalers": folders.refused()})
        case _:
            from diffserve.service.models import image_capabilities

            _print_of_model(kind, image_capabilities(open_engine(settings).info, settings.serve))
    return 0


def run_on_server(kind: Kind, server: str) -> int:
    """Print the names that ``server`` has. Kinds that belong to a model are those of its first image model."""
    from diffserve.client import Client

    with Client(server) as client:
        models = client.models()
    capabilities = [model.capabilities for model in models if model.capabilities is not None]
    image = next((model.image for model in capabilities if model.image is not None), None)
    if kind == "models":
        _print({model.id: "" for model in models})
    elif kind == "styles":
        languages = (model.language for model in capabilities if model.language is not None)
        _print({style: REWRITER_STYLE for language in languages for style in language.styles})
    elif image is not None and kind == "samplers":
        _print({choice.name: choice.label for choice in image.samplers})
    elif image is not None:
        _print_of_model(kind, msgspec.structs.asdict(image))
    return 0


def _print_of_model(kind: Kind, capabilities: Mapping[str, Any]) -> None:
    names, refused = FIELDS[kind]
    _print(dict.fromkeys(capabilities[names], ""))
    refused_names = capabilities[refused] if refused else {}
    reasons = (f"{name} cannot be used: {reason}" for name, reason in refused_names.items())
    note(Console(stderr=True, highlight=False), *reasons)


def _print(descriptions: Mapping[str, str]) -> None:
    """Print a line for each name, with a tab before its description."""
    for name, description in descriptions.items():
        print(f"{name}\t{description}" if description else name)
