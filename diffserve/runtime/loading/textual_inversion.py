"""Words that were learnt (Gal et al. 2022, arXiv 2208.01618): a few vectors that a text encoder reads for a word.

A folder holds one file for each word, as A1111 and diffusers' trainers write them. The file's name without its suffix
is the word; where diffusers' file names one itself ("<cat-toy>"), that is understood, too.

    A1111, .pt or .bin     string_to_param: {"*": (n, dim)}
    A1111, .safetensors    emb_params: (n, dim)
    diffusers              "<cat-toy>": (dim,) or (n, dim), .bin or .safetensors
    SDXL                   clip_l: (n, 768), clip_g: (n, 1280)

Such a folder usually holds words for several families. One that this model's encoders cannot read stays out, and is
said; a prompt that uses it is refused rather than painted with its letters. Pickles are read by torch's restricted
reader, which builds tensors and plain containers and runs nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from diffserve.errors import ModelLoadError, ModelNotFound
from diffserve.runtime.loading.checkpoint import Checkpoint

SUFFIXES: Final = (".safetensors", ".pt", ".bin")
PARTS_OF_A_PAIR: Final = ("clip_l", "clip_g")
"""What the two encoders of SDXL read, in their order."""

A1111_SAFETENSORS: Final = "emb_params"
MAX_VECTORS: Final = 75
"""As many as CLIP's window has room for."""

logger = logging.getLogger(__name__)


class LearntWord(NamedTuple):
    """``names`` that a prompt may call it by, and what each encoder reads there, (n, dim) float32.

    problem   why this model cannot read it, with no ``vectors`` then; empty where it can
    digest    SHA-256 of the file, in hexadecimal
    """

    names: tuple[str, ...]
    vectors: tuple[Tensor, ...]
    problem: str = ""
    digest: str = ""


def read_words(folder: Path, widths: Sequence[int]) -> list[LearntWord]:
    """The words in ``folder`` for encoders that read vectors of ``widths``, by file name.

    Raises ModelNotFound for a folder that is not there, ModelLoadError for a file that is no such word.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"there is no folder {folder}; model.embeddings_dir names where learnt words lie.")
    words = [_read_word(path, widths) for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES]
    known: dict[str, str] = {}
    for word in words:
        for name in word.names:
            if known.setdefault(name.lower(), word.names[0]) != word.names[0]:
                raise ModelLoadError(f"two files in {folder} are called {name!r}; rename one.")
        if word.problem:
            logger.warning("the learnt word %r stays out: %s", word.names[0], word.problem)
    return words


def _read_word(path: Path, widths: Sequence[int]) -> LearntWord:
    own_name, parts = _find_vectors(path, _read_tensors(path))
    names = (path.stem,) if own_name in (None, path.stem) else (path.stem, str(own_name))
    vectors = [part.float().reshape(-1, part.shape[-1]) for part in parts]
    for part in vectors:
        if not 1 <= len(part) <= MAX_VECTORS or not bool(part.isfinite().all()):
            raise ModelLoadError(f"{path} holds {len(part)} vectors; a word has 1 to {MAX_VECTORS}, all finite.")
    found = [part.shape[1] for part in vectors]
    if found != list(widths):
        read = " and ".join(map(str, widths))
        return LearntWord(
            names, (), f"{path.name} is {' and '.join(map(str, found))} numbers wide, this model reads {read}."
        )
    if len({len(part) for part in vectors}) > 1:
        raise ModelLoadError(f"{path}: {' and '.join(PARTS_OF_A_PAIR)} hold unequally many vectors.")
    with path.open("rb") as file:
        return LearntWord(names, tuple(vectors), digest=hashlib.file_digest(file, "sha256").hexdigest())


def _read_tensors(path: Path) -> Mapping[str, Any]:
    if path.suffix == ".safetensors":
        checkpoint = Checkpoint.open([path])
        return {key: checkpoint.read(key) for key in checkpoint.entries}
    try:
        with torch.serialization.safe_globals([nn.ParameterDict, set]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the reader says of what is no such file
        raise ModelLoadError(f"{path} cannot be read as a learnt word ({str(error).splitlines()[0]}).") from error
    return content if isinstance(content, Mapping) else {}


def _find_vectors(path: Path, content: Mapping[str, Any]) -> tuple[str | None, list[Tensor]]:
    """The name that the file gives, if it does, and its vectors, one tensor for each encoder."""
    parts: list[tuple[str | None, Any]]
    if set(PARTS_OF_A_PAIR) <= content.keys():
        parts = [(None, content[name]) for name in PARTS_OF_A_PAIR]
    elif A1111_SAFETENSORS in content:
        parts = [(None, content[A1111_SAFETENSORS])]
    elif "string_to_param" in content:
        parts = [(None, value) for value in dict(_items(content["string_to_param"])).values()]
    else:
        parts = [*content.items()]
    is_pair = len(parts) == len(PARTS_OF_A_PAIR) and parts[0][0] is None
    if (len(parts) == 1 or is_pair) and all(isinstance(part, Tensor) and part.ndim in (1, 2) for _, part in parts):
        return parts[0][0], [part.detach() for _, part in parts]
    held = ", ".join(map(repr, list(content)[:4])) or "nothing"
    raise ModelLoadError(
        f"{path} holds {held}, which is no learnt word as A1111 or diffusers write one; take it out of the folder."
    )


def _items(mapping: Any) -> Iterator[tuple[str, Any]]:
    yield from mapping.items() if hasattr(mapping, "items") else ()
