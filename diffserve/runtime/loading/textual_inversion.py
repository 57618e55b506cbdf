"""Learned words (textual inversion, Gal et al. 2022, arXiv 2208.01618): vectors that stand for a word.

A folder has one safetensors file per word, named after it; a name inside diffusers' file works, too. Formats: A1111
(emb_params: (n, dim)), diffusers ("<cat-toy>": (dim,) or (n, dim)), SDXL (clip_l: (n, 768), clip_g: (n, 1280)). Files
that cannot be used, such as pickles, are skipped with a warning, and a prompt with such a word is rejected.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Final, NamedTuple

from torch import Tensor

from diffserve.api.errors import ModelLoadError, ModelNotFound
from diffserve.models.folder_names import find_below
from diffserve.runtime.loading.checkpoint import Checkpoint

PICKLE_SUFFIXES: Final = (".pt", ".bin")
SUFFIXES: Final = (".safetensors", *PICKLE_SUFFIXES)
CONVERT: Final = (
    "import sys, torch; from safetensors.torch import save_file; "
    "torch.serialization.add_safe_globals([torch.nn.ParameterDict, set]); "
    "d = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "v = next(iter(dict(d.get('string_to_param', d).items()).values())).detach(); "
    "save_file({'emb_params': v.reshape(-1, v.shape[-1]).contiguous()}, sys.argv[2])"
)
"""A Python program that converts a pickle file of A1111 or diffusers to safetensors."""

PARTS_OF_A_PAIR: Final = ("clip_l", "clip_g")
"""What the two encoders of SDXL read, in their order."""

A1111_SAFETENSORS: Final = "emb_params"
MAX_VECTORS: Final = 75
"""As many as CLIP's window has room for."""

logger = logging.getLogger(__name__)


class LearntWord(NamedTuple):
    """A learned word.

    names    what prompts may call it
    vectors  for each text encoder (n, dim) float32; empty where the word cannot be used
    problem  why it cannot be used; "" where it can
    digest   SHA-256 of the file in hexadecimal
    """

    names: tuple[str, ...]
    vectors: tuple[Tensor, ...]
    problem: str = ""
    digest: str = ""


def read_words(folder: Path, widths: Sequence[int]) -> list[LearntWord]:
    """Read the words in ``folder`` and below it, for text encoders that read vectors of ``widths``.

    A file that cannot be used is logged once, and returned with its ``problem``.

    Raises:
        ModelNotFound: ``folder`` is not a directory.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"there is no folder {folder}; model.embeddings_dir names where learned words lie.")
    paths = find_below(folder, lambda path: path.suffix in SUFFIXES and not path.is_dir()).values()
    words = [(path, _read_word(path, widths)) for path in paths]
    words.sort(key=lambda pair: bool(pair[1].problem))  # a file that cannot be used takes no name from one that can
    taken = set[str]()
    checked = []
    for path, word in words:
        names = tuple(name for name in word.names if name.lower() not in taken)
        if word.names[0] not in names:
            names = (path.relative_to(folder).as_posix(),)
            problem = word.problem or f"another file in the folder is called {path.stem!r}, too; rename one."
            word = LearntWord(names, (), problem)
        taken.update(map(str.lower, names))
        if word.problem:
            logger.warning("the learned word %r is skipped: %s", names[0], word.problem)
        checked.append(word._replace(names=names))
    return checked


def _read_word(path: Path, widths: Sequence[int]) -> LearntWord:
    try:
        own_name, parts = _find_vectors(path)
        names = (path.stem,) if own_name in (None, path.stem) else (path.stem, str(own_name))
        vectors = [part.float().reshape(-1, part.shape[-1]) for part in parts]
        for part in vectors:
            if not 1 <= len(part) <= MAX_VECTORS or not bool(part.isfinite().all()):
                raise ModelLoadError(f"{path} holds {len(part)} vectors; a word has 1 to {MAX_VECTORS}, all finite.")
        if len({len(part) for part in vectors}) > 1:
            raise ModelLoadError(f"{path}: {' and '.join(PARTS_OF_A_PAIR)} hold different numbers of vectors.")
    except ModelLoadError as error:
        return LearntWord((path.stem,), (), error.message.replace(str(path), path.name))
    file_widths = [part.shape[1] for part in vectors]
    if file_widths != list(widths):
        expected = " and ".join(map(str, widths))
        problem = f"{path.name} is {' and '.join(map(str, file_widths))} numbers wide, this model reads {expected}."
        return LearntWord(names, (), problem)
    with path.open("rb") as file:
        return LearntWord(names, tuple(vectors), digest=hashlib.file_digest(file, "sha256").hexdigest())


def _find_vectors(path: Path) -> tuple[str | None, list[Tensor]]:
    """Return the name that a file gives its word, if it does, and its vectors, one tensor for each text encoder."""
    if path.suffix in PICKLE_SUFFIXES:
        raise ModelLoadError(
            f"{path} is a pickle file, which can run code when it is read; convert it to safetensors on a machine that "
            f'you can lose: python -c "{CONVERT}" {quote(path.name)} {quote(path.stem)}.safetensors'
        )
    checkpoint = Checkpoint.open([path])
    content = {key: checkpoint.read(key) for key in checkpoint.entries}
    parts: list[tuple[str | None, Tensor]] = [*content.items()]
    if set(PARTS_OF_A_PAIR) <= content.keys():
        parts = [(None, content[name]) for name in PARTS_OF_A_PAIR]
    elif A1111_SAFETENSORS in content:
        parts = [(None, content[A1111_SAFETENSORS])]
    is_pair = len(parts) == len(PARTS_OF_A_PAIR) and parts[0][0] is None
    if (len(parts) == 1 or is_pair) and all(part.ndim in (1, 2) for _, part in parts):
        return parts[0][0], [part for _, part in parts]
    names = ", ".join(map(repr, list(content)[:4])) or "nothing"
    raise ModelLoadError(f"{path} holds {names}, which is no learned word as A1111 or diffusers write one.")
