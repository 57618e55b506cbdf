"""diffserve: text-to-image diffusion, served by rows.

Three lines paint a picture::

    from diffserve import Engine
    engine = Engine.from_pretrained("embedded")
    engine.generate("a fox next to a cactus on the beach")[0].image.save("fox.png")

Everything a user needs is re-exported here and loaded on first use, so ``import diffserve`` costs nothing and the HTTP
process and the command line never pull torch in by accident.
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
        DiffusionParams,
        Event,
        Failed,
        Finished,
        GenerationRequest,
        ImageFailed,
        ImageResult,
        ModelInfo,
        Painted,
        Picture,
        Preview,
        Progress,
        Queued,
        RewriteOptions,
    )
    from diffserve.engine import Engine, Rewriter, Studio, TextEngine
    from diffserve.settings.config import EngineConfig, Settings, TextSettings
    from diffserve.settings.layers import load_settings

_HOMES = (
    "api.errors",
    "api.types",
    "api.sampling_params",
    "api.text_types",
    "api.rewrite_types",
    "settings.config",
    "settings.layers",
    "engine",
)  # torch comes last

__all__ = [
    "Accepted",
    "Cancelled",
    "ChatMessage",
    "DiffserveError",
    "DiffusionParams",
    "Engine",
    "EngineConfig",
    "Event",
    "Failed",
    "Finished",
    "GenerationRequest",
    "ImageFailed",
    "ImageResult",
    "ModelInfo",
    "Painted",
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
    "Studio",
    "TextDelta",
    "TextEngine",
    "TextFinished",
    "TextRequest",
    "TextSettings",
    "load_settings",
]


def __getattr__(name: str) -> Any:
    """Import the home of ``name`` when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'diffserve' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from importlib import import_module

    homes = (import_module(f"diffserve.{home}") for home in _HOMES)
    return next(getattr(home, name) for home in homes if hasattr(home, name))


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
