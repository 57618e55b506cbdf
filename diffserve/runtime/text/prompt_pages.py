"""Page pool tenants of an image model: keys and values of prompts, computed once and held by images that read them.

For every window of a prompt (see ``Window``) there are pages of two kinds of tenant::

    tokens            0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 63 | 64 .. 76
    UNet              held while an image that reads them is generated, then idle
    text encoders     written while a window is encoded, then idle: for texts with a common beginning

A window that is fully cached for the UNet costs nothing. If its beginning is cached, only later tokens are encoded and
projected; the encoders' pages supply what they attend to, and are recomputed if evicted. Pooled vectors of SDXL's
second encoder are cached outside the pool, by the tokens up to the end mark.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
from cachetools import LRUCache
from torch import Tensor

from diffserve.api.errors import ConfigError, InvalidRequest
from diffserve.disk_cache import DiskCache
from diffserve.runtime.kv import PagePool, PageTable, PoolBusy, PoolTooSmall
from diffserve.runtime.low_rank import RowLoRAs, adapting
from diffserve.runtime.precision import hardware_name
from diffserve.runtime.text.encoding import AS_TRAINED, TextEncoderRunner, TextReading, weigh
from diffserve.runtime.text.paged_encoder import MOST_WINDOWS, ImageSpecs, PagedTextEncoder, WindowBatches, segments
from diffserve.runtime.text.prompt import Chunk, Window, WindowName, check_total_chunks, negative_prompt_errors
from diffserve.runtime.text.transferred_encodings import EncodingTable, find_encoding, pooled_name, window_name
from diffserve.runtime.unet.batch_invariance import FactsOnDisk, timed
from diffserve.runtime.unet.cross_attention import KeysValues, Pair
from diffserve.runtime.unet.unet import UNetRunner

POOLED_KEPT = 1024
"""Number of cached pooled vectors: 5 MB for 1280 numbers each in float32."""

HIDDEN_KEPT = 256
"""Number of windows with cached hidden states for transfer: 0.3 MB each for 77 tokens of 2048 numbers in 16 bits."""


@dataclass(frozen=True, eq=False)
class PagedConditioning:
    """Conditioning of one image, with pages that are held until ``close``.

    Attributes:
        cond: One table for each window of the prompt.
        uncond: One table for each window of the negative prompt; empty without guidance.
        pooled_cond: (P,) pooled projection of the second encoder (SDXL), else ``None``.
        pooled_uncond: (P,) pooled projection of the negative prompt (SDXL), else ``None``.
        time_ids: (6,) or (5,) from ``TextEncoderRunner.time_ids`` (SDXL), else ``None``.
    """

    owner: PromptPages
    cond: tuple[PageTable, ...]
    uncond: tuple[PageTable, ...]
    pooled_cond: Tensor | None = None
    pooled_uncond: Tensor | None = None
    time_ids: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of ``cond`` and of ``uncond``; rows of a UNet call must agree in it."""
        return sum(table.num_tokens for table in self.cond)

    def close(self) -> None:
        """Release the pages, once; their contents can be reused until the pool evicts them."""
        self.owner.close(self)


class PromptPages:
    """Prompts of one model as pages of ``pool``. Not thread-safe, like the pool.

    Args:
        is_exact: Keys and values have the same bytes whatever was cached before (see ``text.paged_encoder``).

    Attributes:
        num_open: Number of conditionings that hold pages.

    Raises:
        ConfigError: The pool cannot hold a single guided image.
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
        max_windows = max(1, min(MOST_WINDOWS, fitting if text.encodings is None and not unet.is_hollow else 1))
        self.batches = WindowBatches(timed(self._try), disk, is_exact=is_exact, max_windows=max_windows)
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
        """Open pages of ``prompt`` and, unless ``None``, of ``negative``; see ``condition_all``."""
        pairs = ((prompt, negative),)
        return self.condition_all(pairs, width_px=width_px, height_px=height_px, reading=reading)[0]

    @torch.inference_mode()
    def condition_all(
        self,
        pairs: Sequence[tuple[str, str | None]],
        *,
        width_px: int,
        height_px: int,
        reading: TextReading = AS_TRAINED,
    ) -> tuple[PagedConditioning, ...]:
        """Open pages of pairs of prompt and negative prompt of one image, all with the same number of windows.

        Raises:
            InvalidRequest: A prompt is too long or has too large weights, or all together are too long.
            PoolTooSmall: The pages can never fit into the pool.
            PoolBusy: The pages do not fit now. No pages are held then; what was computed stays cached.
        """
        read = self._read_all(pairs, reading)
        need = self.num_pages([window for texts in read for windows in texts for window in windows])
        if need > self.pool.num_pages:
            raise PoolTooSmall(
                f"the prompt and its negative prompt take {need} pages and the whole pool has {self.pool.num_pages}: "
                f"shorten them, or set engine.kv_pool_bytes to {need * self.pool.page_bytes} or more.",
                param="prompt",
            )
        tables: list[PageTable] = []
        try:
            with reading_with(reading):
                for cond, uncond in read:
                    for window in (*cond, *uncond):
                        tables.append(self._open(window))
                pooled = [(self._pooled_of(cond), self._pooled_of(uncond)) for cond, uncond in read]
        except BaseException:
            self._close(tables)
            raise
        self.num_open += len(read)
        tables_left, time_ids = iter(tables), self.text.time_ids(width_px, height_px)
        conditionings: list[PagedConditioning] = []
        for (cond, uncond), (pooled_cond, pooled_uncond) in zip(read, pooled, strict=True):
            of_cond, of_uncond = (tuple(islice(tables_left, len(windows))) for windows in (cond, uncond))
            conditionings.append(PagedConditioning(self, of_cond, of_uncond, pooled_cond, pooled_uncond, time_ids))
        return tuple(conditionings)

    @torch.inference_mode()
    def export_encodings(self, prompt: str, negative: str | None, reading: TextReading = AS_TRAINED) -> EncodingTable:
        """Return the encodings of both texts that :meth:`condition` reads from ``text.encodings`` without encoders.

        Raises the same errors, except for pages of the UNet, as none are held.
        """
        [(cond, uncond)] = self._read_all([(prompt, negative)], reading)
        table: EncodingTable = {}
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

    def _read_all(
        self, pairs: Sequence[tuple[str, str | None]], reading: TextReading
    ) -> list[tuple[tuple[Window, ...], tuple[Window, ...]]]:
        """Return the windows of both texts of each pair, all equally many, as ``reading`` reads them."""
        read = [self.windows(*pair) for pair in pairs]
        if len(read) > 1:
            texts = {text for pair in pairs for text in pair if text}
            check_total_chunks(sum(len(self.text.windows(text)) for text in texts), self.text.window_tokens)
            num_windows = max(len(cond) for cond, _ in read)
            read = [self.windows(*pair, num_windows) for pair in pairs]
        if not reading.adapters and reading.clip_skip == 1:
            return read
        change = partial(replace, adapters=reading.adapters, clip_skip=reading.clip_skip)
        return [(tuple(map(change, cond)), tuple(map(change, uncond))) for cond, uncond in read]

    @torch.inference_mode()
    def precompute(self, texts: Iterable[tuple[str, str | None]]) -> None:
        """Compute the missing windows of ``texts`` in few calls, and hold their pages until ``release_precomputed``.

        ``texts`` are prompts and negative prompts. Windows with a common beginning are computed in turn, so that it is
        computed once. Does nothing if pages are scarce. Errors may be ignored, as texts can still be computed one by
        one.
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
        """Return the pooled output (P,) of the last encoder for each of ``windows``.

        Tokens after the page of the end mark are not computed, as attention is causal. Raises PoolBusy while pages are
        scarce.
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

    def release_precomputed(self) -> None:
        """Close prepared windows that no image has used; they stay cached in the pool."""
        self._close(self._ready.values())
        self._ready = {}

    def _missing(self, texts: Iterable[tuple[str, str | None]]) -> dict[WindowName, Window]:
        """Return windows that are not in the pool, by name; none if they do not fit all at once."""
        windows: dict[WindowName, Window] = {}
        for prompt, negative in texts:
            try:
                cond, uncond = self.windows(prompt, negative)
            except InvalidRequest:
                continue  # its own request reports the error
            windows |= {window.name: window for window in (*cond, *uncond)}
        missing = {name: window for name, window in windows.items() if self._num_cached(window) < window.num_tokens}
        together = min(len(missing), self.batches.sizes[-1])
        need = self.num_pages([*windows.values()]) + (together - 1) * self._encoding_pages
        return missing if together > 1 and need <= self.pool.num_available else {}

    def _num_cached(self, window: Window) -> int:
        return self.pool.num_cached(self.specs.unet.tenant, window.token_ids, window.salt)

    def _try(self, rows: range) -> Tensor:
        """Compute keys and values (len(rows), numbers) of random windows, on pages that are not indexed."""
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

    def windows(
        self, prompt: str, negative: str | None, min_windows: int = 1
    ) -> tuple[tuple[Window, ...], tuple[Window, ...]]:
        """Return the windows of both texts, padded with empty windows to the longer one and at least ``min_windows``.

        There are none for a ``negative`` of ``None``.
        """
        cond, empty = self.text.windows(prompt), self.text.windows("")
        cond += empty * max(0, min_windows - len(cond))
        if negative is None:
            return cond, ()
        if self.text.zero_empty_negative and not negative:
            return cond, tuple(Window(window.chunks, is_silent=True) for window in empty * len(cond))
        with negative_prompt_errors():
            uncond = self.text.windows(negative)
        missing = len(cond) - len(uncond)
        return cond + empty * max(0, -missing), uncond + empty * max(0, missing)

    def gather(self, rows: Sequence[tuple[PageTable, ...]]) -> KeysValues:
        """Copy the keys and values of the rows out of their pages; a mask hides the padding of shorter rows."""
        counts = [len(tables) for tables in rows]
        filled = [tables + tables[:1] * (max(counts) - len(tables)) for tables in rows]
        batch = self.pool.batch([table for tables in filled for table in tables])
        pairs = []
        for layer in range(len(self.specs.unet.layers)):
            keys, values = batch.gather(layer)  # (R * windows, tokens, heads, head_dim)
            pairs.append(Pair(*(tensor.reshape(len(rows), -1, *tensor.shape[2:]) for tensor in (keys, values))))
        mask = None if min(counts) == max(counts) else self._mask(counts)
        return KeysValues(tuple(pairs), mask)

    def close(self, conditioning: PagedConditioning) -> None:
        """Release the pages of ``conditioning``, unless it is closed already."""
        if conditioning.cond[0].is_open:
            self._close((*conditioning.cond, *conditioning.uncond))
            self.num_open -= 1

    def _mask(self, counts: Sequence[int]) -> Tensor:
        """Return a bool mask (R, 1, 1, tokens) of the first ``counts[row]`` windows of each row."""
        window = torch.arange(max(counts), device=self.unet.device).repeat_interleave(self.text.window_tokens)
        return (window < torch.tensor(counts, device=self.unet.device)[:, None])[:, None, None, :]

    def num_pages(self, windows: Sequence[Window]) -> int:
        """Return the largest number of pages to encode and hold ``windows``, shared only among themselves."""
        plan = self.pool.plan(self.specs.unet.tenant)
        names = {name for window in windows for name in window.logical_page_names(plan.spec.page_tokens)}
        return len(names) * plan.num_groups + self._encoding_pages

    @property
    def _encoding_pages(self) -> int:
        """Number of pages of the window that is being encoded, by one encoder at a time."""
        tokens = self.text.window_tokens
        return max(self.pool.num_pages_for(spec.tenant, tokens) for spec in self.specs.encoders)

    def _close(self, tables: Iterable[PageTable]) -> None:
        for table in tables:
            self.pool.close(table)

    def _open(self, window: Window) -> PageTable:
        """Return a table with keys and values of all tokens of ``window``, computed now if they are not cached."""
        return self._ready.pop(window.name, None) or self._open_together([window])[0]

    def _open_together(self, windows: Sequence[Window]) -> list[PageTable]:
        """Open tables for windows of one kind with equally many cached tokens, which share none of the missing ones."""
        with ExitStack() as stack:
            tables, cached = [], set()
            for window in windows:
                ids = window.token_ids
                table, num_cached = self.pool.open(self.specs.unet.tenant, ids, window.salt, reserve=len(ids))
                stack.callback(self.pool.close, table)
                tables.append(table)
                cached.add(num_cached)
            if len(cached) > 1:
                raise PoolBusy("pages of a text were needed for another text in progress.")
            [first] = cached
            if first < windows[0].num_tokens:
                self._write(tables, first, self._contexts(windows, first))
                for table, window in zip(tables, windows, strict=True):
                    self.pool.commit(table, window.token_ids)
            stack.pop_all()
        return tables

    def _contexts(self, windows: Sequence[Window], first: int) -> Tensor:
        """Return embeddings (B, tokens, dim) of tokens ``first`` onward, concatenated over the encoders."""
        if windows[0].is_silent:
            shape = (len(windows), windows[0].num_tokens - first, self.unet.network.config.cross_attention_dim)
            return torch.zeros(shape, dtype=self.unet.dtype, device=self.unet.device)
        if self.text.encodings is not None:
            table = self.text.encodings
            return torch.stack([find_encoding(table, window_name(*window.name)) for window in windows])[:, first:]
        start = 0 if windows[0].is_weighted else first  # weighting restores the mean of all tokens
        read = list(zip(*(window.chunks for window in windows), strict=True))  # chunks of all windows, by encoder
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
        """Return the pooled vector (P,) of the first window, or ``None`` if the model has none."""
        if not self.text.is_sdxl or not windows:
            return None
        if windows[0].is_silent:
            width = self.text.encoders[-1].network.config.projection_dim
            return torch.zeros(width, dtype=self.unet.dtype, device=self.unet.device)
        name = salt, read = self._name_of_pooled(windows[0])
        if self.text.encodings is not None:
            return find_encoding(self.text.encodings, pooled_name(*name))
        if name not in self._pooled:
            ids, end = windows[0].chunks[-1].ids, len(read) - 1
            self._keep_pooled(ids, end, self.encoders[-1].encode(ids, first=end, salt=salt).last, salt)
        return self._pooled[name]

    def _name_of_pooled(self, window: Window) -> WindowName:
        """Return the cache key of a pooled vector: the adapters and the tokens up to the end mark."""
        ids = window.chunks[-1].ids
        return window.adapters, ids[: self.encoders[-1].place_of_end(ids) + 1]

    def _keep_pooled(self, ids: tuple[int, ...], first: int, last: Tensor, salt: bytes) -> None:
        """Cache the pooled vector if the end mark is among ``last`` (tokens, dim), tokens ``first`` onward."""
        end = self.encoders[-1].place_of_end(ids)
        if end >= first:
            self._pooled[salt, ids[: end + 1]] = self.encoders[-1].pooled(last[end - first])


def reading_with(reading: TextReading) -> AbstractContextManager[None]:
    """Return a context in which texts are read with the adapters of ``reading``."""
    return adapting(RowLoRAs([reading.loras]) if reading.loras and reading.adapters else None)
