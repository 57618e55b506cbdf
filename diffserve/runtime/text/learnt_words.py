"""Textual inversion: words in prompts that the encoder reads as learnt vectors.

Each vector is an additional token with an id above those of the tokenizer, and is counted, split, weighted and cached
like other tokens. Words match completely and in any case, as in A1111.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffserve.api.errors import InvalidRequest
from diffserve.runtime.loading.textual_inversion import LearntWord


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
        self._any = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, names))})(?!\w)", re.IGNORECASE)

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
