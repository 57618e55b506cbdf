"""diffserve: a server and library for text-to-image diffusion with continuous batching.

    from diffserve import Engine
    Engine.from_pretrained("embedded").generate("a fox on the beach")[0].image.save("fox.png")

Public names are imported on first use, so that ``import diffserve`` is fast and does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffserve.version import __version__ as __version__

if TYPE_CHECKING:
    from diffserve.api.errors import DiffserveError
    from diffserve.api.rewrite_types import Rewrite, RewriteDelta, RewriteFinished, RewriteRequest
    from diffserve.api.sampling_params import SamplingParams
    from diffserve.api.text_types import ChatMessage, TextDelta, TextFinished, TextRequest
    from diffserve.api.types import (
        Accepted,
        Cancelled,
        Captured,
        DiffusionParams,
        Event,
        Failed,
        Finished,
        GenerationRequest,
        ImageFailed,
        ImageFinished,
        ImageResult,
        ModelInfo,
        Picture,
        Preview,
        Progress,
        Queued,
        RewriteOptions,
    )
    from diffserve.engine import CombinedEngine, Engine, Rewriter, TextEngine
    from diffserve.settings.config import EngineConfig, Settings, TextSettings
    from diffserve.settings.layers import load_settings

_MODULES = (
    "api.errors",
    "api.types",
    "api.sampling_params",
    "api.text_types",
    "api.rewrite_types",
    "settings.config",
    "settings.layers",
    "engine",
)  # modules that import torch come last

__all__ = [
    "Accepted",
    "Cancelled",
    "Captured",
    "ChatMessage",
    "CombinedEngine",
    "DiffserveError",
    "DiffusionParams",
    "Engine",
    "EngineConfig",
    "Event",
    "Failed",
    "Finished",
    "GenerationRequest",
    "ImageFailed",
    "ImageFinished",
    "ImageResult",
    "ModelInfo",
    "Picture",
    "Preview",
    "Progress",
    "Queued",
    "Rewrite",
    "RewriteDelta",
    "RewriteFinished",
    "RewriteOptions",
    "RewriteRequest",
    "Rewriter",
    "SamplingParams",
    "Settings",
    "TextDelta",
    "TextEngine",
    "TextFinished",
    "TextRequest",
    "TextSettings",
    "load_settings",
]


def __getattr__(name: str) -> Any:
    """Import the module that defines ``name`` on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'diffserve' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from importlib import import_module

    modules = (import_module(f"diffserve.{module}") for module in _MODULES)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
