"""Options that several commands have, and the settings that they are."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from diffserve.settings.config import Settings
    from diffserve.settings.layers import Flag


def _names_in(module: str, table: str) -> Callable[[str], list[str]]:
    """Completes to the names in a ``table`` of a ``module``."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in getattr(import_module(module), table) if name.lower().startswith(incomplete.lower())]

    return complete


complete_model = _names_in("diffserve.settings.layers", "PROFILES")
complete_sampler = _names_in("schedulers", "SAMPLERS")
complete_quality = _names_in("diffserve.settings.quality", "QUALITIES")
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="embedded, embedded-turbo, sd15, sdxl, a diffusers folder or a .safetensors file.",
        metavar="MODEL",
        autocompletion=complete_model,
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option("--config", help="A TOML file, or embedded, embedded-turbo, sd15, sdxl, edge.", metavar="FILE"),
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:0, xpu or mps.")]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="auto, float32, bfloat16, float16, int8, int8_dynamic or int8_static."),
]
EmbeddingsOption = Annotated[
    str | None,
    typer.Option(
        "--embeddings-dir", help="Folder of learned words (textual inversion), as safetensors files.", metavar="DIR"
    ),
]
OffloadOption = Annotated[
    str | None, typer.Option("--offload", help="Where weights rest between uses: none, auto, cpu or disk.")
]
DeviceMapOption = Annotated[
    str | None, typer.Option("--device-map", help="One model over all GPUs: none, auto or balanced.")
]
VAEOption = Annotated[
    str | None,
    typer.Option("--vae", help="A VAE, or a model that has one, in place of the model's own.", metavar="PATH"),
]
TextEncoderOption = Annotated[
    str | None, typer.Option("--text-encoder", help="The same of the text encoder and its tokenizer.", metavar="DIR")
]
RefinerOption = Annotated[
    str | None, typer.Option("--refiner", help="A model that takes over for the last steps.", metavar="MODEL")
]
ScorerOption = Annotated[
    str | None, typer.Option("--scorer", help="What --best-of chooses by: checker, or a CLIP model.", metavar="DIR")
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server", envvar="DIFFSERVE_SERVER", help="A running server that does it, by its address.", metavar="URL"
    ),
]
HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on.")]
PortOption = Annotated[int | None, typer.Option("--port", help="Port to listen on; 0: any free one.")]
AllowOpenOption = Annotated[
    bool | None, typer.Option("--allow-open", help="Let other machines in, though there are no keys.")
]
PageOption = Annotated[bool | None, typer.Option("--page/--no-page", help="A page for browsers at /, or none.")]
ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="As for generate, or NAME=MODEL; several: the others are loaded when requests name them.",
        metavar="MODEL",
        autocompletion=complete_model,
    ),
]
UnloadAfterOption = Annotated[
    float | None,
    typer.Option("--unload-after", help="Unload a model after so long without work; 0: never.", metavar="SECONDS"),
]
LoraDirOption = Annotated[
    str | None, typer.Option("--lora-dir", help="A folder of adapters that requests may name.", metavar="DIR")
]
ControlNetDirOption = Annotated[
    str | None, typer.Option("--controlnet-dir", help="A folder of ControlNets that requests may name.", metavar="DIR")
]
WatermarkOption = Annotated[
    bool | None,
    typer.Option("--watermark/--no-watermark", help="Pixels that say, unseen, that a machine painted them."),
]
DataDirOption = Annotated[str | None, typer.Option("--data-dir", help="The server's own folder.", metavar="DIR")]


def folder_settings(data_dir: str | None, config: str | None) -> Settings:
    """Settings for what has to do with a server's folder alone."""
    from diffserve.settings.layers import Flag, load_settings

    return load_settings(config=config, flags={"serve.data_dir": Flag("--data-dir", data_dir)})


def serving_flags(
    host: str | None,
    port: int | None,
    allow_open: bool | None,
    data_dir: str | None,
    page: bool | None,
    unload_after: float | None,
    models: list[str] | None,
) -> tuple[dict[str, Flag], str | None]:
    """Who may come where, for what, and the first model: options of commands that serve."""
    from diffserve.settings.layers import Flag, split_name

    name, first = split_name(models[0]) if models else (None, None)
    flags = {
        "serve.host": Flag("--host", host),
        "serve.port": Flag("--port", port),
        "serve.allow_open": Flag("--allow-open", allow_open),
        "serve.data_dir": Flag("--data-dir", data_dir),
        "serve.page": Flag("--page/--no-page", page),
        "serve.unload_after_s": Flag("--unload-after", unload_after),
        "model.model_id": Flag("--model", name),
    }
    return flags, first


def beside_flags(
    lora_dir: str | None, controlnet_dir: str | None, refiner: str | None, scorer: str | None, watermark: bool | None
) -> dict[str, Flag]:
    """What may stand beside a model, and what its pictures bear: options of commands."""
    from diffserve.settings.layers import Flag

    return {
        "model.lora_dir": Flag("--lora-dir", lora_dir),
        "model.controlnet_dir": Flag("--controlnet-dir", controlnet_dir),
        "model.refiner": Flag("--refiner", refiner),
        "model.scorer": Flag("--scorer", scorer),
        "serve.watermark": Flag("--watermark/--no-watermark", watermark),
    }


def placement_flags(
    device: str | None,
    dtype: str | None,
    offload: str | None,
    device_map: str | None,
    vae: str | None = None,
    text_encoder: str | None = None,
    embeddings_dir: str | None = None,
) -> dict[str, Flag]:
    """Where a model and its parts lie, where they run, how precisely, and where weights rest: options of commands."""
    from diffserve.settings.layers import Flag

    return {
        "model.embeddings_dir": Flag("--embeddings-dir", embeddings_dir),
        "model.device": Flag("--device", device),
        "model.dtype": Flag("--dtype", dtype),
        "model.vae": Flag("--vae", vae),
        "model.text_encoder": Flag("--text-encoder", text_encoder),
        "engine.offload": Flag("--offload", offload),
        "engine.device_map": Flag("--device-map", device_map),
    }
