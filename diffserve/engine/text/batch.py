"""TextBatch: the pieces of a tick as the network and the sampler take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from diffserve.engine.text.plan import Piece
from diffserve.engine.text.task import TextTask
from diffserve.runtime.decoding import DecodingRow
from diffserve.runtime.language import Chunk


@dataclass(frozen=True)
class TextBatch:
    """Every field filled at birth.

    chunks       one for each piece
    tasks, rows  the texts that choose in this tick, and their rows; followers of a request beside its first text
    drafts       of each row, empty for none
    draft_probs  of each row: what its draft was drawn from, None for a draft that was looked up
    lines        which lines of the call's logits belong to the rows, one row after another; None: all, in order
    searches     beam searches that step, with their lines
    """

    chunks: tuple[Chunk, ...]
    tasks: tuple[TextTask, ...]
    rows: tuple[DecodingRow, ...]
    drafts: tuple[Sequence[int], ...]
    draft_probs: tuple[Tensor | None, ...]
    lines: tuple[int, ...] | None
    searches: dict[TextTask, list[int]]

    @classmethod
    def of(cls, pieces: Sequence[Piece], draft_probs: dict[Piece, Tensor]) -> TextBatch:
        """The batch of ``pieces``, whose drafts are final."""
        chunks: list[Chunk] = []
        tasks: list[TextTask] = []
        members: list[tuple[DecodingRow, Sequence[int], Tensor | None]] = []
        lines: list[int] = []
        searches: dict[TextTask, list[int]] = {}
        num_lines = 0
        for piece in pieces:
            table = piece.sequence.table
            assert table is not None
            num_logits = len(piece.draft) + 1 if piece.is_last else 0
            chunks.append(Chunk(table, piece.start, piece.token_ids, num_logits))
            own = range(num_lines, num_lines + num_logits)
            num_lines += num_logits
            if piece.task.search is not None:
                searches.setdefault(piece.task, []).extend(own)
            elif num_logits:
                followers = piece.task.live.followers if piece.task.text_index == 0 else ()
                for task in (piece.task, *followers):
                    tasks.append(task)
                    members.append((task.sequences[0].row, piece.draft, draft_probs.get(piece)))
                    lines += own
        rows, drafts, probs = zip(*members, strict=True) if members else ((), (), ())
        is_all = lines == list(range(num_lines))
        stepping = {task: found for task, found in searches.items() if len(found) == len(task.sequences)}
        return cls(tuple(chunks), tuple(tasks), rows, drafts, probs, None if is_all else tuple(lines), stepping)
