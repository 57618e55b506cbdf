"""Which language model rewrites: the one that ships inside, or any directory."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from diffserve.errors import ModelNotFound

EMBEDDED: Final = "embedded"
DIRECTORY: Final = Path(__file__).resolve().parents[2] / "embedded" / "rewriter"
"""The embedded rewriter, trained by ``diffserve.embedded.train rewriter``."""


def find_rewriter(name: str) -> Path:
    """The directory of the model called ``name``: "embedded", or a path. Raises ModelNotFound with the way out."""
    directory = DIRECTORY if name == EMBEDDED else Path(name).expanduser()
    if (directory / "config.json").is_file():
        return directory
    if name == EMBEDDED:
        raise ModelNotFound(
            "the rewriter that ships inside has no weights in this installation: train them with "
            "'python -m diffserve.embedded.train rewriter', or give the directory of an instruct model.",
            param="model",
        )
    raise ModelNotFound(
        f"no language model at {name!r}: give the directory of an instruct model, as transformers writes it "
        '(config.json, safetensors and a tokenizer with a chat template), or "embedded".',
        param="model",
    )
