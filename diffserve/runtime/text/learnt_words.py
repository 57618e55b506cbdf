"""Textual inversion (Gal et al. 2022, arXiv 2208.01618): words in prompts that the encoder reads as learned vectors.

Each vector is an additional token with an id above those of the tokenizer, and is counted, split, weighted and cached
like other tokens. Words match completely and in any case, as in A1111.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from diffserve.api.errors import InvalidRequest, ModelLoadError, ModelNotFound
from diffserve.models.model_files import find_below
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

    The folder has one safetensors file per word, named after it; a name inside diffusers' file works, too. Formats:
    A1111 (emb_params: (n, dim)), diffusers ("<cat-toy>": (dim,) or (n, dim)), SDXL (clip_l: (n, 768), clip_g:
    (n, 1280)). A file that cannot be used, such as a pickle, is logged once, and returned with its ``problem``.

    Raises:
        ModelNotFound: ``folder`` is not a directory.
    """
    if not folder.is_dir():
        raise ModelNotFound(
            f"there is no folder {folder}; model.embeddings_dir must be the folder of the learned words."
        )
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
        problem = f"{path.name} is {' and '.join(map(str, file_widths))} numbers wide, but this model reads {expected}."
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
    raise ModelLoadError(f"{path} holds {names}, which is not a learned word in the format of A1111 or diffusers.")


class LearntEmbedding(nn.Module):
    """Token embeddings ``base``, wherever its weights rest, and after its last row ``vectors`` (n, dim)."""

    vectors: Tensor

    def __init__(self, base: nn.Embedding, vectors: Tensor) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("vectors", vectors, persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """(..., dim) for ids (...)."""
        first = self.base.num_embeddings
        plain = self.base(token_ids.clamp(max=first - 1))
        learnt = self.vectors.to(plain.device)[(token_ids - first).clamp(min=0)]
        return torch.where((token_ids < first)[..., None], plain, learnt)


class LearntWords:
    """The words of one model: ``ids`` by name in small letters, the same in every encoder.

    num_vectors  by the first id of a word; it is never cut in the middle
    refused      why files of the folder cannot be used, by the names of their words
    """

    def __init__(self, words: Sequence[LearntWord], first_id: int) -> None:
        self.ids: dict[str, range] = {}
        self.num_vectors: dict[int, int] = {}
        self._problems: dict[str, str] = {}
        self.refused = {word.names[0]: word.problem for word in words if word.problem}
        self._digests = {name.lower(): (word.names[0], word.digest) for word in words for name in word.names}
        for word in words:
            ids = range(first_id, first_id + (len(word.vectors[0]) if word.vectors else 0))
            first_id = ids.stop
            self._problems |= dict.fromkeys(map(str.lower, word.names), word.problem) if word.problem else {}
            if ids:
                self.num_vectors[ids.start] = len(ids)
                self.ids |= dict.fromkeys(map(str.lower, word.names), ids)
        names = sorted({*self.ids, *self._problems}, key=len, reverse=True)
        any_name = "|".join(map(re.escape, names)) or "(?!)"
        self._any = re.compile(rf"(?<!\w)({any_name})(?!\w)", re.IGNORECASE)

    def split(self, text: str) -> Iterator[str | range]:
        """``text`` in pieces: runs of it, and the ids of the words in between.

        Raises InvalidRequest for a word that this model cannot read.
        """
        for place, piece in enumerate(self._any.split(text)):
            if place % 2 == 0:
                yield piece
            elif problem := self._problems.get(piece.lower()):
                raise InvalidRequest(f"the learned word {piece!r} cannot be used: {problem}", param="prompt")
            else:
                yield self.ids[piece.lower()]

    def digests(self, text: str) -> dict[str, str]:
        """Return the file digests of the learnt words in ``text``, by file name."""
        return dict(self._digests[piece.lower()] for piece in self._any.split(text)[1::2])


NO_WORDS: Final = LearntWords((), 0)


def teach(network: Any, words: Sequence[LearntWord], place: int, end: int) -> LearntWords:
    """Add the embeddings of ``words`` to the text encoder ``network``, the model's ``place``-th.

    ``end`` is its tokenizer's end mark. Old configurations name a wrong one, 2, and transformers then takes the largest
    id, which would be that of a learnt word.
    """
    body = getattr(network, "text_model", network)
    base = body.embeddings.token_embedding
    vectors = [word.vectors[place] for word in words if word.vectors]
    if vectors:
        like = body.embeddings.position_embedding.weight
        learnt = torch.cat(vectors).to(device=like.device, dtype=like.dtype)
        body.embeddings.token_embedding = LearntEmbedding(base, learnt)
        network.config.eos_token_id = body.eos_token_id = end if body.eos_token_id == 2 else body.eos_token_id
    return LearntWords(words, base.num_embeddings)
