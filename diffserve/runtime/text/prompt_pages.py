"""The image model's tenants of the page pool: keys and values of prompts, made once, held by the images that read them.

For every window of a prompt (see ``Window``) there are pages of two kinds of tenant::

    tokens            0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 63 | 64 .. 76
    UNet              held while an image that reads them is painted, then idle
    text encoders     written while a window is encoded, then idle: for texts that begin alike

A window that the UNet's tenant has whole costs nothing. Where it has a beginning, only the tokens after it are encoded
and projected; what they attend to comes from the encoders' own pages, and is computed again where those are gone.
The pooled vector of SDXL's second encoder is small and kept beside the pool, by the tokens up to the end mark.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

import torch
from cachetools import LRUCache
from torch import Tensor

from diffserve.api.errors import ConfigError, InvalidRequest
from diffserve.disk_cache import DiskCache
from diffserve.runtime.kv import KVSpec, PagePool, PageTable, PoolBusy, PoolTooSmall
from diffserve.runtime.low_rank import RowLoRAs, adapting
from diffserve.runtime.precision import hardware_name
from diffserve.runtime.text.encoding import AS_TRAINED, TextEncoderRunner, TextReading, Window, WindowName, weigh
from diffserve.runtime.text.paged_encoder import MOST_WINDOWS, PagedTextEncoder, WindowBatches, segments, text_spec
from diffserve.runtime.text.prompt import Chunk
from diffserve.runtime.text.transferred_encodings import handed, pooled_name, window_name
from diffserve.runtime.unet.batch_invariance import FactsOnDisk, timed
from diffserve.runtime.unet.cross_attention import KeysValues, Pair
from diffserve.runtime.unet.unet import UNetRunner

POOLED_KEPT = 1024
"""Pooled vectors of 1280 numbers: 5 MB in float32."""

HIDDEN_KEPT = 256
"""Windows whose hidden states are kept, to be handed over: 77 tokens of 2048 numbers are 0.3 MB in 16 bits."""


@dataclass(frozen=True)
class ImageSpecs:
    """The tenants of one image model: its UNet's cross-attention, and each text encoder's self-attention."""

    unet: KVSpec
    encoders: tuple[KVSpec, ...]

    def __iter__(self) -> Iterator[KVSpec]:
        return iter((self.unet, *self.encoders))

    @classmethod
    def of(
        cls, text: TextEncoderRunner, unet: UNetRunner, identity: bytes, encoders: Sequence[bytes] | None = None
    ) -> ImageSpecs:
        """``identity``: a hash of all that decides the numbers: weights, adapters, quantisation, the cut of segments;
        ``encoders``: the same of each text encoder, ``None``: no other.

        Raises ConfigError for a UNet whose cross-attention cannot be paged.
        """
        dtype, layers = unet.dtype, unet.cross_attention.layers
        indexed = enumerate(zip(text.encoders, encoders or [identity] * len(text.encoders), strict=True), start=1)
        return cls(
            KVSpec(f"unet:{_short(identity)}", layers, dtype, model_digest=identity, whole_sequences=True),
            tuple(
                text_spec(
                    encoder.network,
                    tenant=f"text{index}:{_short(encoder_identity)}",
                    dtype=dtype,
                    identity=encoder_identity,
                )
                for index, (encoder, encoder_identity) in indexed
            ),
        )


def _short(identity: bytes) -> str:
    return identity.hex()[:12]


@dataclass(frozen=True, eq=False)
class PagedConditioning:
    """What the UNet is told about one image; its pages are held until ``close``.

    cond, uncond                 one table for each window of the prompt and, for guided images, of the negative prompt
    pooled_cond, pooled_uncond   (P,) pooled projections of the second encoder (SDXL), else ``None``
    time_ids                     (6,) or (5,) as ``TextEncoderRunner.time_ids`` has them (SDXL), else ``None``
    """

    owner: PromptPages
    cond: tuple[PageTable, ...]
    uncond: tuple[PageTable, ...]
    pooled_cond: Tensor | None = None
    pooled_uncond: Tensor | None = None
    time_ids: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of ``cond`` and of ``uncond``; rows share a UNet call only when they have the same."""
        return sum(table.num_tokens for table in self.cond)

    def close(self) -> None:
        """Give the pages back, once; what they hold can be found again until the pool wants the room."""
        self.owner.close(self)


class PromptPages:
    """Prompts of one model as pages of ``pool``. For one thread, as the pool is.

    is_exact: keys and values are the same bytes whatever was cached when they were made (see ``text.pages``)
    num_open: conditionings that hold pages

    Raises ConfigError when the pool cannot hold a single guided image.
    """

    def __init__(
        self,
        pool: PagePool,
        text: TextEncoderRunner,
        unet: UNetRunner,
        specs: ImageSpecs,
        *,
        is_exact: bool,
        cache: DiskCache | None = None,
    ) -> None:
        self.pool = pool
        self.text = text
        self.unet = unet
        self.specs = specs
        self.is_exact = is_exact
        self.num_open = 0
        pool.register(specs.unet)
        self.encoders = tuple(
            PagedTextEncoder(pool, encoder.network, spec, stops_early=text.is_sdxl, is_exact=is_exact)
            for encoder, spec in zip(text.encoders, specs.encoders, strict=True)
        )
        self._pooled: LRUCache[WindowName, Tensor] = LRUCache(POOLED_KEPT)
        self._hidden: LRUCache[bytes, Tensor] = LRUCache(HIDDEN_KEPT)
        self._ready: dict[WindowName, PageTable] = {}
        machine = f"{hardware_name(unet.device)} torch {torch.__version__} threads {torch.get_num_threads()}"
        disk = FactsOnDisk(cache or DiskCache(None), f"{specs.unet.digest.hex()} {machine}")
        fitting = pool.num_pages // (pool.num_pages_for(specs.unet.tenant, text.window_tokens) + self._encoding_pages)
        max_windows = max(1, min(MOST_WINDOWS, fitting if text.handed is None and not unet.is_hollow else 1))
        self.batches = WindowBatches(timed(self._try), disk, is_exact=is_exact, most=max_windows)
        min_pages = 2 * pool.num_pages_for(specs.unet.tenant, text.window_tokens) + self._encoding_pages
        if min_pages > pool.num_pages:
            raise ConfigError(
                f"the page pool has {pool.num_pages * pool.page_bytes} bytes, and a prompt with its negative "
                f"prompt takes {min_pages * pool.page_bytes}: set engine.kv_pool_bytes to that or more.",
                param="kv_pool_bytes",
            )

    @torch.inference_mode()
    def condition(
        self,
        prompt: str,
        negative: str | None,
        *,
        width_px: int,
        height_px: int,
        reading: TextReading = AS_TRAINED,
    ) -> PagedConditioning:
        """Pages of ``prompt`` and, unless ``None``, of ``negative``, both of the same number of windows.

        Raises InvalidRequest for a prompt that is too long or weighted beyond measure, PoolTooSmall when its pages can
        never be held, and PoolBusy when they cannot be now; then nothing is held, and what was computed is idle.
        """
        cond, uncond = self._read(prompt, negative, reading)
        need = self.num_pages((*cond, *uncond))
        if need > self.pool.num_pages:
            raise PoolTooSmall(
                f"the prompt and its negative prompt take {need} pages and the whole pool has {self.pool.num_pages}: "
                f"shorten them, or set engine.kv_pool_bytes to {need * self.pool.page_bytes} or more.",
                param="prompt",
            )
        tables: list[PageTable] = []
        try:
            with reading_with(reading):
                for window in (*cond, *uncond):
                    tables.append(self._open(window))
                pooled_cond, pooled_uncond = self._pooled_of(cond), self._pooled_of(uncond)
        except BaseException:
            self._close(tables)
            raise
        self.num_open += 1
        return PagedConditioning(
            self,
            tuple(tables[: len(cond)]),
            tuple(tables[len(cond) :]),
            pooled_cond,
            pooled_uncond,
            self.text.time_ids(width_px, height_px),
        )

    @torch.inference_mode()
    def hand_over(self, prompt: str, negative: str | None, reading: TextReading = AS_TRAINED) -> dict[bytes, Tensor]:
        """What :meth:`condition` needs of the encoders for both texts, where ``text.handed`` has it. Raises as it does,
        but for pages of the UNet, of which none are held.
        """
        cond, uncond = self._read(prompt, negative, reading)
        table: dict[bytes, Tensor] = {}
        with reading_with(reading):
            for window in (*cond, *uncond):
                if not window.is_silent:
                    name = window_name(*window.name)
                    if name not in self._hidden:
                        self._hidden[name] = self._contexts([window], 0)[0]
                    table[name] = self._hidden[name]
            for windows in (cond, uncond):
                pooled = self._pooled_of(windows)
                if pooled is not None and not windows[0].is_silent:
                    table[pooled_name(*self._name_of_pooled(windows[0]))] = pooled
        return table

    def _read(
        self, prompt: str, negative: str | None, reading: TextReading
    ) -> tuple[tuple[Window, ...], tuple[Window, ...]]:
        """The windows of both texts, as they are read."""
        adapters, clip_skip = reading.adapters, reading.clip_skip
        cond, uncond = self.windows(prompt, negative)
        if not adapters and clip_skip == 1:
            return cond, uncond
        changed = [
            [replace(window, adapters=adapters, clip_skip=clip_skip) for window in part] for part in (cond, uncond)
        ]
        return tuple(changed[0]), tuple(changed[1])

    @torch.inference_mode()
    def make_ready(self, texts: Iterable[tuple[str, str | None]]) -> None:
        """Compute what the pool lacks of ``texts``, prompts and negative prompts, in few calls for all of them, and
        have it ready until ``let_go`` for those who ask. Windows that begin alike take turns: their beginning is
        computed once.

        Does nothing where pages are short. What it raises need not be the end: texts are computed one by one, too.
        """
        missing = self._missing(texts)
        page_tokens = self.specs.unet.page_tokens
        while missing:
            turn = dict[WindowName, tuple[WindowName, int]]()
            for name, window in missing.items():
                first = self._num_cached(window)
                turn.setdefault((window.salt, window.token_ids[: first + page_tokens]), (name, first))
            names_by_kind = defaultdict[tuple[int, bool, bool], list[WindowName]](list)
            for name, first in turn.values():
                names_by_kind[first, missing[name].is_weighted, missing[name].is_silent].append(name)
            for names in names_by_kind.values():
                for places in self.batches.cut(len(names)):
                    batch = [missing.pop(names[place]) for place in places]
                    self._ready |= zip((window.name for window in batch), self._open_together(batch), strict=True)

    def embed(self, windows: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """(P,) for each of ``windows`` of the last encoder: what it pools of it. What lies behind the page of the end
        mark is not computed: no token looks ahead. PoolBusy while pages are short.
        """
        encoder, page_tokens = self.encoders[-1], self.specs.encoders[-1].page_tokens
        ends = [encoder.place_of_end(ids) for ids in windows]
        by_page = defaultdict[int, list[int]](list)
        for place, end in enumerate(ends):
            by_page[end // page_tokens * page_tokens].append(place)
        pooled: dict[int, Tensor] = {}
        for first, places in by_page.items():
            for indices in self.batches.cut(len(places)):
                texts = [windows[places[index]][: first + page_tokens] for index in indices]
                encoded = encoder.encode_together(texts, first=first, cut=self.batches.cut)
                for index, text in zip(indices, encoded, strict=True):
                    place = places[index]
                    pooled[place] = encoder.pooled(text.last[ends[place] - first])
        return [pooled[place] for place in range(len(windows))]

    def let_go(self) -> None:
        """Close what was made ready and nobody asked for; it is idle in the pool."""
        self._close(self._ready.values())
        self._ready = {}

    def _missing(self, texts: Iterable[tuple[str, str | None]]) -> dict[WindowName, Window]:
        """Windows that the pool has not, by name; none where there is no room for all at once."""
        windows: dict[WindowName, Window] = {}
        for prompt, negative in texts:
            try:
                cond, uncond = self.windows(prompt, negative)
            except InvalidRequest:
                continue  # who asks for it will be told
            windows |= {window.name: window for window in (*cond, *uncond)}
        missing = {name: window for name, window in windows.items() if self._num_cached(window) < window.num_tokens}
        together = min(len(missing), self.batches.sizes[-1])
        need = self.num_pages([*windows.values()]) + (together - 1) * self._encoding_pages
        return missing if together > 1 and need <= self.pool.num_available else {}

    def _num_cached(self, window: Window) -> int:
        return self.pool.num_cached(self.specs.unet.tenant, window.token_ids, window.salt)

    def _try(self, rows: range) -> Tensor:
        """Keys and values (len(rows), numbers) of random windows, on pages that nobody finds."""
        windows = [self._random_window(row) for row in rows]
        tenant, num_tokens = self.specs.unet.tenant, self.text.window_tokens
        with ExitStack() as stack, torch.inference_mode():
            tables = [self.pool.open(tenant, reserve=num_tokens)[0] for _ in rows]
            stack.callback(self._close, tables)
            self._write(tables, 0, self._contexts(windows, 0))
            gathered = self.gather([(table,) for table in tables])
            return torch.cat([tensor.flatten(1) for pair in gathered.layers for tensor in pair], dim=1).cpu()

    def _random_window(self, row: int) -> Window:
        rng = random.Random(row)
        chunks = []
        for encoder in self.text.encoders:
            ids = (rng.randrange(encoder.network.config.vocab_size) for _ in range(self.text.window_tokens - 1))
            chunks.append(Chunk((encoder.special.start, *ids), (1.0,) * self.text.window_tokens))
        return Window(tuple(chunks))

    def windows(self, prompt: str, negative: str | None) -> tuple[tuple[Window, ...], tuple[Window, ...]]:
        """The windows of both texts, the shorter one filled up with empty windows; none where ``negative`` is None."""
        cond, empty = self.text.windows(prompt), self.text.windows("")
        if negative is None:
            return cond, ()
        if self.text.zero_empty_negative and not negative:
            return cond, tuple(Window(window.chunks, is_silent=True) for window in empty * len(cond))
        uncond = self.text.windows(negative)
        missing = len(cond) - len(uncond)
        return cond + empty * max(0, -missing), uncond + empty * max(0, missing)

    def gather(self, rows: Sequence[tuple[PageTable, ...]]) -> KeysValues:
        """What the rows look at, copied out of the pages; a mask hides what fills up a row of fewer windows."""
        counts = [len(tables) for tables in rows]
        filled = [tables + tables[:1] * (max(counts) - len(tables)) for tables in rows]
        batch = self.pool.batch([table for tables in filled for table in tables])
        pairs = []
        for layer in range(len(self.specs.unet.layers)):
            keys, values, _ = batch.gather(layer)  # (R * windows, tokens, heads, head_dim)
            pairs.append(Pair(*(tensor.reshape(len(rows), -1, *tensor.shape[2:]) for tensor in (keys, values))))
        mask = None if min(counts) == max(counts) else self._mask(counts)
        return KeysValues(tuple(pairs), mask)

    def close(self, conditioning: PagedConditioning) -> None:
        """See ``PagedConditioning.close``."""
        if conditioning.cond[0].is_open:
            self._close((*conditioning.cond, *conditioning.uncond))
            self.num_open -= 1

    def _mask(self, counts: Sequence[int]) -> Tensor:
        """Bool (R, 1, 1, tokens): the first ``counts[row]`` windows of each row."""
        window = torch.arange(max(counts), device=self.unet.device).repeat_interleave(self.text.window_tokens)
        return (window < torch.tensor(counts, device=self.unet.device)[:, None])[:, None, None, :]

    def num_pages(self, windows: Sequence[Window]) -> int:
        """Pages that it takes at most to encode ``windows`` and hold them, shared among themselves and with nobody."""
        plan = self.pool.plan(self.specs.unet.tenant)
        names = {name for window in windows for name in window.logical_page_names(plan.spec.page_tokens)}
        return len(names) * plan.num_groups + self._encoding_pages

    @property
    def _encoding_pages(self) -> int:
        """Pages of the window that is being encoded, by one encoder at a time."""
        tokens = self.text.window_tokens
        return max(self.pool.num_pages_for(spec.tenant, tokens) for spec in self.specs.encoders)

    def _close(self, tables: Iterable[PageTable]) -> None:
        for table in tables:
            self.pool.close(table)

    def _open(self, window: Window) -> PageTable:
        """A table with keys and values of all of the window's tokens, computed now where the pool lacks them."""
        return self._ready.pop(window.name, None) or self._open_together([window])[0]

    def _open_together(self, windows: Sequence[Window]) -> list[PageTable]:
        """The same for windows of one kind, of which the pool has equally much and that share nothing it lacks."""
        with ExitStack() as stack:
            tables, cached = [], set()
            for window in windows:
                ids = window.token_ids
                table, num_cached = self.pool.open(self.specs.unet.tenant, ids, window.salt, reserve=len(ids))
                stack.callback(self.pool.close, table)
                tables.append(table)
                cached.add(num_cached)
            if len(cached) > 1:
                raise PoolBusy("pages of a text were wanted for another one that is made beside it.")
            [first] = cached
            if first < windows[0].num_tokens:
                self._write(tables, first, self._contexts(windows, first))
                for table, window in zip(tables, windows, strict=True):
                    self.pool.commit(table, window.token_ids)
            stack.pop_all()
        return tables

    def _contexts(self, windows: Sequence[Window], first: int) -> Tensor:
        """Embeddings (B, tokens, dim) of tokens ``first`` onwards, the encoders' side by side."""
        if windows[0].is_silent:
            shape = (len(windows), windows[0].num_tokens - first, self.unet.network.config.cross_attention_dim)
            return torch.zeros(shape, dtype=self.unet.dtype, device=self.unet.device)
        if self.text.handed is not None:
            table = self.text.handed
            return torch.stack([handed(table, window_name(*window.name)) for window in windows])[:, first:]
        start = 0 if windows[0].is_weighted else first  # the mean that weighting restores is the whole window's
        read = list(zip(*(window.chunks for window in windows), strict=True))  # by encoder, of every window
        adapters, clip_skip = windows[0].adapters, windows[0].clip_skip
        encoded = [
            encoder.encode_together(
                [chunk.ids for chunk in chunks], first=start, salt=adapters, clip_skip=clip_skip, cut=self.batches.cut
            )
            for encoder, chunks in zip(self.encoders, read, strict=True)
        ]
        if self.text.is_sdxl:
            for chunk, text in zip(read[-1], encoded[-1], strict=True):
                self._keep_pooled(chunk.ids, start, text.last, windows[0].adapters)
        weighed = [
            torch.stack([weigh(text.hidden, chunk.weights) for text, chunk in zip(of_all, chunks, strict=True)])
            for of_all, chunks in zip(encoded, read, strict=True)
        ]
        return torch.cat(weighed, dim=-1)[:, first - start :]

    def _write(self, tables: Sequence[PageTable], first: int, contexts: Tensor) -> None:
        """Project ``contexts`` (B, tokens, dim) in every layer, and store them from token ``first`` on."""
        batch = self.pool.batch(tables, [first] * len(tables))
        cuts = segments(first, tables[0].num_tokens, self.specs.unet.page_tokens, is_exact=self.is_exact)
        pieces = [contexts[:, start - first : stop - first] for start, stop in cuts]
        for layer in range(len(self.specs.unet.layers)):
            pairs = [self.unet.cross_attention.project(layer, piece) for piece in pieces]
            batch.write(layer, *(torch.cat(tensors, dim=1).flatten(0, 1) for tensors in zip(*pairs, strict=True)))

    def _pooled_of(self, windows: Sequence[Window]) -> Tensor | None:
        """The pooled vector (P,) of the first of ``windows``, ``None`` where the model has none."""
        if not self.text.is_sdxl or not windows:
            return None
        if windows[0].is_silent:
            width = self.text.encoders[-1].network.config.projection_dim
            return torch.zeros(width, dtype=self.unet.dtype, device=self.unet.device)
        name = salt, read = self._name_of_pooled(windows[0])
        if self.text.handed is not None:
            return handed(self.text.handed, pooled_name(*name))
        if name not in self._pooled:
            ids, end = windows[0].chunks[-1].ids, len(read) - 1
            self._keep_pooled(ids, end, self.encoders[-1].encode(ids, first=end, salt=salt).last, salt)
        return self._pooled[name]

    def _name_of_pooled(self, window: Window) -> WindowName:
        """What is pooled of ``window`` is kept by its adapters and the tokens up to the end mark."""
        ids = window.chunks[-1].ids
        return window.adapters, ids[: self.encoders[-1].place_of_end(ids) + 1]

    def _keep_pooled(self, ids: tuple[int, ...], first: int, last: Tensor, salt: bytes) -> None:
        """Keep the pooled vector when the end mark is among ``last`` (tokens, dim), tokens ``first`` onwards."""
        end = self.encoders[-1].place_of_end(ids)
        if end >= first:
            self._pooled[salt, ids[: end + 1]] = self.encoders[-1].pooled(last[end - first])


def reading_with(reading: TextReading) -> AbstractContextManager[None]:
    """While texts are read as ``reading`` says."""
    return adapting(RowLoRAs([reading.loras]) if reading.loras and reading.adapters else None)
