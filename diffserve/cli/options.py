"""Options shared by several commands, and the settings that they set."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from diffserve.api.fields import SHARED_FIELDS, RequestField

if TYPE_CHECKING:
    from diffserve.settings.config import Settings
    from diffserve.settings.layers import Flag


def _names_in(module: str, table: str) -> Callable[[str], list[str]]:
    """Return a shell completion function for the names in ``table`` of ``module``.

    The module is imported only when the shell asks for a completion.
    """

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
        help="Model: embedded, embedded-turbo, sd15, sdxl, a diffusers folder or a .safetensors file.",
        metavar="MODEL",
        autocompletion=complete_model,
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config", help="Configuration: a TOML file, or embedded, embedded-turbo, sd15, sdxl or edge.", metavar="FILE"
    ),
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Device: auto, cpu, cuda, cuda:0, xpu or mps.")]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="Precision: auto, float32, bfloat16, float16, int8, int8_dynamic or int8_static."),
]
EmbeddingsOption = Annotated[
    str | None,
    typer.Option("--embeddings-dir", help="Folder of textual inversion embeddings (safetensors files).", metavar="DIR"),
]
OffloadOption = Annotated[
    str | None, typer.Option("--offload", help="Offload weights between uses: none, auto, cpu or disk.")
]
DeviceMapOption = Annotated[
    str | None, typer.Option("--device-map", help="Split one model across all GPUs: none, auto or balanced.")
]
VAEOption = Annotated[
    str | None,
    typer.Option("--vae", help="Use this VAE, or the VAE of this model, instead of the model's own.", metavar="PATH"),
]
TextEncoderOption = Annotated[
    str | None,
    typer.Option(
        "--text-encoder", help="Use this text encoder and tokenizer instead of the model's own.", metavar="DIR"
    ),
]
RefinerOption = Annotated[
    str | None, typer.Option("--refiner", help="Run the last steps with this model.", metavar="MODEL")
]
ScorerOption = Annotated[
    str | None,
    typer.Option(
        "--scorer",
        help="Rank the images of --best-of with this scorer: checker, or a CLIP model folder.",
        metavar="DIR",
    ),
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server", envvar="DIFFSERVE_SERVER", help="Run on this server instead of on this machine.", metavar="URL"
    ),
]
HostOption = Annotated[str | None, typer.Option("--host", help="Listen on this address.")]
PortOption = Annotated[int | None, typer.Option("--port", help="Listen on this port; 0: any free port.")]
AllowOpenOption = Annotated[
    bool | None, typer.Option("--allow-open", help="Accept requests from other machines without an API key.")
]
PageOption = Annotated[bool | None, typer.Option("--page/--no-page", help="Serve the web page at /, or not.")]
ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="MODEL as for generate, or NAME=MODEL; repeatable. Models after the first load on demand.",
        metavar="MODEL",
        autocompletion=complete_model,
    ),
]
UnloadAfterOption = Annotated[
    float | None,
    typer.Option("--unload-after", help="Unload a model that is idle for this long; 0: never.", metavar="SECONDS"),
]
LoraDirOption = Annotated[
    str | None, typer.Option("--lora-dir", help="Folder of LoRA adapters that requests can name.", metavar="DIR")
]
ControlNetDirOption = Annotated[
    str | None, typer.Option("--controlnet-dir", help="Folder of ControlNets that requests can name.", metavar="DIR")
]
WatermarkOption = Annotated[
    bool | None,
    typer.Option(
        "--watermark/--no-watermark", help="Embed an invisible watermark that marks images as AI-generated, or not."
    ),
]
DataDirOption = Annotated[str | None, typer.Option("--data-dir", help="Data folder of the server.", metavar="DIR")]


SHARED: Final = "shared"
"""Parameter of a command that receives the values of the shared request fields, by name."""


def with_shared_fields(command: Callable[..., int]) -> Callable[..., int]:
    """Replace the parameter ``shared`` of ``command`` by one option for each shared field of the field table."""
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        options = [_option_of(name, field) for name, field in SHARED_FIELDS.items()]
        parameters += options if parameter.name == SHARED else [parameter]

    @wraps(command)
    def run(**arguments: Any) -> int:
        shared = {name: arguments.pop(name) for name in SHARED_FIELDS}
        return command(**arguments, **{SHARED: shared})

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
    return run


def _option_of(name: str, field: RequestField) -> inspect.Parameter:
    kind = str if field.choices else field.type  # the check of the request names the choices
    option = typer.Option(field.default, field.option, help=field.help, metavar=field.metavar, hidden=field.is_hidden)
    annotation = kind | None if field.default is None else kind
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=option, annotation=annotation)


def folder_settings(data_dir: str | None, config: str | None) -> Settings:
    """Return the settings for commands that need only the data folder of a server."""
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
    """Return the flags of commands that serve, and the first model without its name."""
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


def model_extra_flags(
    lora_dir: str | None, controlnet_dir: str | None, refiner: str | None, scorer: str | None, watermark: bool | None
) -> dict[str, Flag]:
    """Return the flags for adapters, ControlNets, refiner, scorer and watermark."""
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
    """Return the flags for model components, device, precision and offloading."""
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
