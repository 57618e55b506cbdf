"""Model names: the loaded model under its own id, and under the names that clients have written into their code."""

from __future__ import annotations

from typing import Any, Final

from diffserve.errors import ModelNotFound
from diffserve.service.schemas import show
from diffserve.types import ModelInfo

ALIASES: Final = (
    "dall-e-2",
    "dall-e-3",
    "gpt-image-1",
    "gpt-image-1-mini",
    "gpt-image-1.5",
    "gpt-image-2",
    "gpt-image-2.5-flare",
    "gpt-image-2.5-sunburst",
    "gpt-image-2.6-flare",
    "gpt-image-2.6-sunburst",
    "chatgpt-image-latest",
)


def check_model(name: str | None, info: ModelInfo) -> None:
    """ModelNotFound where ``name`` is neither the loaded model nor an alias; ``None`` is the loaded model."""
    if name is not None and name != info.model_id and name not in ALIASES:
        raise ModelNotFound(
            f"there is no model {show(name)}; {info.model_id} is loaded, GET /v1/models lists its names.", param="model"
        )


def model_entry(name: str, created: int) -> dict[str, Any]:
    """A model as OpenAI describes one; ``created`` in seconds since 1970."""
    return {"id": name, "object": "model", "created": created, "owned_by": "diffserve"}


def model_list(info: ModelInfo, created: int) -> dict[str, Any]:
    """The loaded model first, then its aliases."""
    return {"object": "list", "data": [model_entry(name, created) for name in (info.model_id, *ALIASES)]}
