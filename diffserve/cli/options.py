"""Options shared by several commands: each is declared once, with the configuration key that it sets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

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
MODEL_HELP: Final = "Model: embedded, embedded-turbo, sd15, sdxl, a diffusers folder or a .safetensors file."
MODELS_HELP: Final = "MODEL as for generate, or NAME=MODEL; repeatable. Models after the first load on demand."
CONFIG_HELP: Final = "Configuration: a TOML file, or embedded, embedded-turbo, sd15, sdxl or edge."
PAGE_HELP: Final = "Serve the web page at /, or not."
WATERMARK_HELP: Final = "Embed an invisible watermark that marks images as AI-generated, or not."
SCORER_HELP: Final = "Rank the images of --best-of with this scorer: checker, or a CLIP model folder."
DEVICES_HELP: Final = "Run an engine on each device: cuda:0,cuda:1; cpu,cpu splits the cores."
DTYPE_HELP: Final = "Precision: auto, float32, bfloat16, float16, int8, int8_dynamic or int8_static."
VAE_HELP: Final = "Use this VAE, or the VAE of this model, instead of the model's own."
TEXT_ENCODER_HELP: Final = "Use this text encoder and tokenizer instead of the model's own."
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server", envvar="DIFFSERVE_SERVER", help="Run on this server instead of on this machine.", metavar="URL"
    ),
]


class SettingOption(NamedTuple):
    """A command-line option that sets the configuration key ``key``; "": see ``SettingsOptions``."""

    key: str
    option: str
    help: str
    metavar: str | None = None
    type: Any = str
    complete: Callable[[str], list[str]] | None = None


SETTING_OPTIONS: Final = {
    "model": SettingOption("", "--model", MODEL_HELP, "MODEL", str, complete_model),
    "models": SettingOption("", "--model", MODELS_HELP, "MODEL", list[str], complete_model),
    "config": SettingOption("", "--config", CONFIG_HELP, "FILE"),
    "host": SettingOption("serve.host", "--host", "Listen on this address."),
    "port": SettingOption("serve.port", "--port", "Listen on this port; 0: any free port.", None, int),
    "allow_open": SettingOption(
        "serve.allow_open", "--allow-open", "Accept requests from other machines without an API key.", None, bool
    ),
    "unload_after": SettingOption(
        "serve.unload_after_s", "--unload-after", "Unload a model that is idle for this long; 0: never.",
        "SECONDS", float,
    ),
    "data_dir": SettingOption(
        "serve.data_dir", "--data-dir", "Data folder of the server: database, keys and images.", "DIR"
    ),
    "page": SettingOption("serve.page", "--page/--no-page", PAGE_HELP, None, bool),
    "watermark": SettingOption("serve.watermark", "--watermark/--no-watermark", WATERMARK_HELP, None, bool),
    "lora_dir": SettingOption("model.lora_dir", "--lora-dir", "Folder of LoRA adapters that requests can name.", "DIR"),
    "controlnet_dir": SettingOption(
        "model.controlnet_dir", "--controlnet-dir", "Folder of ControlNets that requests can name.", "DIR"
    ),
    "reference_dir": SettingOption(
        "model.reference_dir", "--reference-dir", "Folder of IP-Adapters and their image encoders for references.",
        "DIR",
    ),
    "sampler_dir": SettingOption(
        "model.sampler_dir", "--sampler-dir", "Folder of learned samplers that requests can name.", "DIR"
    ),
    "wildcard_dir": SettingOption(
        "model.wildcard_dir", "--wildcard-dir", "Folder of text files for wildcards in prompt templates.", "DIR"
    ),
    "upscaler_dir": SettingOption(
        "model.upscaler_dir", "--upscaler-dir", "Folder of upscalers that requests can name.", "DIR"
    ),
    "refiner": SettingOption("model.refiner", "--refiner", "Run the last steps with this model.", "MODEL"),
    "scorer": SettingOption("model.scorer", "--scorer", SCORER_HELP, "DIR"),
    "device": SettingOption("model.device", "--device", "Device: auto, cpu, cuda, cuda:0, xpu or mps."),
    "devices": SettingOption("serve.devices", "--devices", DEVICES_HELP, "LIST"),
    "dtype": SettingOption("model.dtype", "--dtype", DTYPE_HELP),
    "offload": SettingOption("engine.offload", "--offload", "Offload weights between uses: none, auto, cpu or disk."),
    "device_map": SettingOption(
        "engine.device_map", "--device-map", "Split one model across all GPUs: none, auto or balanced."
    ),
    "vae": SettingOption("model.vae", "--vae", VAE_HELP, "PATH"),
    "text_encoder": SettingOption("model.text_encoder", "--text-encoder", TEXT_ENCODER_HELP, "DIR"),
    "embeddings_dir": SettingOption(
        "model.embeddings_dir", "--embeddings-dir", "Folder of textual inversion embeddings (safetensors files).", "DIR"
    ),
}  # fmt: skip
"""Options that determine settings, by the name of their parameter."""

FOLDERS: Final = ("lora_dir", "controlnet_dir", "reference_dir", "sampler_dir", "wildcard_dir", "upscaler_dir")
FURTHER_FILES: Final = (*FOLDERS, "refiner", "scorer")
COMPONENTS: Final = ("dtype", "offload", "device_map", "vae", "text_encoder")


class SettingsOptions(NamedTuple):
    """The options of a command that determine its settings.

    Attributes:
        flags: Options that set a configuration key, by key.
        model: Model name or path.
        config: Configuration name or file.
        models: Further models of a server.
    """

    flags: dict[str, Flag]
    model: str | None = None
    config: str | None = None
    models: tuple[str, ...] = ()

    def load(self, more_flags: Mapping[str, Flag] | None = None) -> Settings:
        """Return the settings.

        Args:
            more_flags: Values of options that only one command has, by configuration key.

        Raises:
            ConfigError: A setting is invalid.
        """
        from diffserve.settings.layers import load_settings

        flags = {**self.flags, **(more_flags or {})}
        return load_settings(model=self.model, config=self.config, flags=flags, models=self.models)

    @property
    def loading_flags(self) -> dict[str, Flag]:
        """All options but the model, for ``remote.refuse_placement``."""
        from diffserve.settings.layers import Flag

        return {**self.flags, "": Flag("--config", self.config)}


def with_settings(*names: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Replace the parameter ``settings`` of a command by the options ``names`` of ``SETTING_OPTIONS``."""
    options = {name: SETTING_OPTIONS[name] for name in names}
    parameters = [_setting_parameter(name, option) for name, option in options.items()]

    def read(values: dict[str, Any]) -> SettingsOptions:
        from diffserve.settings.layers import Flag, split_name

        flags = {option.key: Flag(option.option, values[name]) for name, option in options.items() if option.key}
        model, models = values.get("model"), values.get("models") or ()
        if models:
            name, model = split_name(models[0])
            flags["model.model_id"] = Flag("--model", name)
        return SettingsOptions(flags, model, values.get("config"), tuple(models[1:]))

    return lambda command: _replace_parameter(command, "settings", parameters, read)


def with_shared_fields(command: Callable[..., int]) -> Callable[..., int]:
    """Replace the parameter ``shared`` of ``command`` by one option for each shared field of the field table."""
    parameters = [_field_parameter(name, field) for name, field in SHARED_FIELDS.items()]
    return _replace_parameter(command, "shared", parameters, dict)


def _replace_parameter(
    command: Callable[..., int],
    name: str,
    options: list[inspect.Parameter],
    read: Callable[[dict[str, Any]], Any],
) -> Callable[..., int]:
    """Return ``command`` with the parameters ``options`` instead of ``name``, which gets ``read`` of their values."""
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        parameters += options if parameter.name == name else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

    @wraps(command)
    def run(**arguments: Any) -> int:
        values = {option.name: arguments.pop(option.name) for option in options}
        return command(**arguments, **{name: read(values)})

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
    return run


def _setting_parameter(name: str, setting: SettingOption) -> inspect.Parameter:
    option = typer.Option(
        None, setting.option, help=setting.help, metavar=setting.metavar, autocompletion=setting.complete
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=setting.type | None)


def _field_parameter(name: str, field: RequestField) -> inspect.Parameter:
    kind = str if field.choices else field.type  # the check of the request names the choices
    option = typer.Option(field.default, field.option, help=field.help, metavar=field.metavar, hidden=field.is_hidden)
    annotation = kind | None if field.default is None else kind
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)
