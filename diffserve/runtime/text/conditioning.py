"""Two kinds of text conditioning: key/value pages computed once for each prompt, or embeddings at every step.

``paged``   the keys and values of every cross-attention layer are computed for a new prompt, kept in the page pool, and
            shared by equal prompts and common beginnings. An image is admitted when its pages fit.
``plain``   no pool: the text's embeddings go through diffusers' own attention. For UNets whose cross-attention is not
            Stable Diffusion's, for processes that only decode, and for comparison.

They agree within rounding (``Engine.tolerance`` of the free mode).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from diffserve.api.bounds import check
from diffserve.api.errors import ConfigError
from diffserve.disk_cache import DiskCache
from diffserve.runtime import DiffusionModel
from diffserve.runtime.kv import KVSpec, PagePlan, PagePool, PageTable, PoolBusy
from diffserve.runtime.reference_pages import PagedReference, gather_images, open_image
from diffserve.runtime.reference_store import ReadReference
from diffserve.runtime.text.encoding import AS_TRAINED, Conditioning, TextReading
from diffserve.runtime.text.paged_encoder import ImageSpecs
from diffserve.runtime.text.prompt_pages import PagedConditioning, PromptPages
from diffserve.runtime.text.transferred_encodings import EncodingTable
from diffserve.runtime.unet.cross_attention import Contexts, ImagePart
from diffserve.settings.config import EngineConfig

AUTO_WINDOWS = 64
"""Number of different one-window prompts that a pool of automatic size can hold."""

HELD_ELSEWHERE: Final = 2
"""Number of one-window prompts for a pool without a UNet."""

AUTO_TEXT_TOKENS: Final = 256
"""Tokens of each of the ``max_sequences`` texts that a pool of automatic size can hold."""

logger = logging.getLogger(__name__)

AnyConditioning = Conditioning | PagedConditioning


class ConditioningRow(NamedTuple):
    """Row of a UNet call: the conditioning of its image, and which half of it."""

    conditioning: AnyConditioning
    is_uncond: bool


class PlainConditioner:
    """Conditions the UNet by text embeddings, which it projects in every layer at every step.

    Attributes:
        pool: Page pool, ``None`` without pages.
        tenants: Names of the pool's tenants that belong to the model.
        mixes_lengths: Whether rows of different token counts may share a call.
    """

    pool: PagePool | None = None
    tenants: tuple[str, ...] = ()
    mixes_lengths = False

    def __init__(self, model: DiffusionModel) -> None:
        self.model = model

    def condition(
        self,
        prompt: str,
        negative: str | None,
        *,
        width_px: int,
        height_px: int,
        reading: TextReading = AS_TRAINED,
    ) -> Conditioning:
        """Return the conditioning of one image, to be closed afterwards. ``negative`` is None without guidance.

        Raises InvalidRequest, and PoolBusy when the image has to wait for pages.
        """
        pairs = ((prompt, negative),)
        return self.condition_all(pairs, width_px=width_px, height_px=height_px, reading=reading)[0]

    def condition_all(
        self,
        pairs: Sequence[tuple[str, str | None]],
        *,
        width_px: int,
        height_px: int,
        reading: TextReading = AS_TRAINED,
    ) -> tuple[Conditioning, ...]:
        """Return the conditioning of each pair of prompt and negative prompt of one image, all of one length.

        Raises InvalidRequest.
        """
        return self.model.text.encode_all(pairs, width_px=width_px, height_px=height_px, reading=reading)

    def embed(self, windows: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return the last text encoder's pooled output (P,) for each of ``windows``. May raise PoolBusy."""
        return [self.model.text.pooled(ids) for ids in windows]

    def export_encodings(self, prompt: str, negative: str | None, reading: TextReading = AS_TRAINED) -> EncodingTable:
        """Return the encodings that ``condition`` needs in a process without encoders (its ``text.encodings``)."""
        return self.model.text.export_encodings((prompt, negative or ""), reading)

    def precompute(self, texts: Iterable[tuple[str, str | None]]) -> None:
        """Precompute prompts for requests before ``release_precomputed``; plain embeddings precompute nothing."""

    def release_precomputed(self) -> None:
        """Release precomputed prompts; does nothing here."""

    def study(self) -> bool:
        """Measure one batch size for joint text encoding; always False here."""
        return False

    def contexts(self, rows: Sequence[ConditioningRow]) -> Tensor:
        """Return the contexts (R, tokens, dim) of the rows of one call."""
        halves = [row.conditioning.uncond if row.is_uncond else row.conditioning.cond for row in rows]
        return torch.stack([half for half in halves if isinstance(half, Tensor)])

    def image_parts(self, rows: Sequence[Sequence[tuple[PageTable, float]]]) -> tuple[ImagePart, ...]:
        """Return the references of the rows of a call; always empty here, as references need pages."""
        return ()

    def open_references(
        self, references: Sequence[tuple[ReadReference, float]], conditioning: AnyConditioning, *, is_guided: bool
    ) -> tuple[PagedReference, ...]:
        """Open no pages: requests with references are refused without pages."""
        return ()

    def of_embeddings(self, embeddings: Tensor) -> Tensor:
        """Return contexts for embeddings (R, tokens, dim) that belong to no text, unchanged."""
        return embeddings

    def check_integrity(self, num_held: int) -> None:
        """Check held pages; plain embeddings hold none, so this does nothing."""


class PagedConditioner(PromptPages):
    """Conditioner that keeps keys and values on the pages of ``pool``.

    Texts of different window counts share calls only when bit-exact results are not promised, because a longer call
    may round differently.
    """

    def __init__(
        self, model: DiffusionModel, pool: PagePool, *, is_exact: bool, cache: DiskCache | None = None
    ) -> None:
        super().__init__(
            pool, model.text, model.unet, image_specs(model, is_exact=is_exact), is_exact=is_exact, cache=cache
        )
        self.model = model
        self.mixes_lengths = not is_exact
        self.tenants: tuple[str, ...] = tuple(spec.tenant for spec in self.specs)
        self._waiting: tuple[tuple[tuple[tuple[str, str | None], ...], bytes, int], int] | None = None

    def condition(
        self,
        prompt: str,
        negative: str | None,
        *,
        width_px: int,
        height_px: int,
        reading: TextReading = AS_TRAINED,
    ) -> PagedConditioning:
        """Open the pages of one image; as ``PlainConditioner.condition``."""
        pairs = ((prompt, negative),)
        return self.condition_all(pairs, width_px=width_px, height_px=height_px, reading=reading)[0]

    def condition_all(
        self,
        pairs: Sequence[tuple[str, str | None]],
        *,
        width_px: int,
        height_px: int,
        reading: TextReading = AS_TRAINED,
    ) -> tuple[PagedConditioning, ...]:
        """Open the pages of one image; as ``PlainConditioner.condition_all``.

        An image that was refused is not tried again until more pages are available than then.
        """
        texts = tuple(pairs), reading.adapters, reading.clip_skip
        if self._waiting is not None and self._waiting[0] == texts and self.pool.num_available <= self._waiting[1]:
            raise PoolBusy("no page became free since the last attempt.")
        self._waiting = None
        try:
            return super().condition_all(pairs, width_px=width_px, height_px=height_px, reading=reading)
        except PoolBusy:
            self._waiting = texts, self.pool.num_available
            raise

    def study(self) -> bool:
        """Make one measuring call for batches of windows; returns whether there was one to make."""
        return self.batches.study()

    def contexts(self, rows: Sequence[ConditioningRow]) -> Contexts:
        """Copy the rows' keys and values out of the pages, (R, tokens, heads, head_dim) each."""
        halves = [row.conditioning.uncond if row.is_uncond else row.conditioning.cond for row in rows]
        return self.gather([half for half in halves if isinstance(half, tuple)])

    def image_parts(self, rows: Sequence[Sequence[tuple[PageTable, float]]]) -> tuple[ImagePart, ...]:
        """Copy the keys and values of references out of the pages, for each row with its scales."""
        return gather_images(self.pool, self.specs.unet, rows, is_exact=self.is_exact)

    def open_references(
        self, references: Sequence[tuple[ReadReference, float]], conditioning: AnyConditioning, *, is_guided: bool
    ) -> tuple[PagedReference, ...]:
        """Open the pages of the references of one image.

        Args:
            references: References and their scales.
            conditioning: The text conditioning of the image, whose pages are held.
            is_guided: Whether the image has unconditional rows.

        Raises:
            PoolBusy: The pages do not fit now; then none of them are held.
            PoolTooSmall: They can never fit.
        """
        assert isinstance(conditioning, PagedConditioning)
        opened: list[PagedReference] = []
        try:
            for (adapter, cond, uncond, keys), scale in references:
                reference = PagedReference(
                    self.pool, open_image(self.pool, self.specs.unet, adapter, cond, keys[0]), None, scale
                )
                opened.append(reference)
                if is_guided:
                    table = open_image(self.pool, self.specs.unet, adapter, uncond, keys[1])
                    opened[-1] = replace(reference, uncond=table)
        except BaseException:
            for reference in opened:
                reference.close()
            need = self._needed_pages(references, conditioning, is_guided=is_guided)
            check(
                need <= self.pool.num_pages,
                f"the prompts and references take {need} pages and the whole pool has {self.pool.num_pages}: use fewer "
                f"references, or set engine.kv_pool_bytes to {need * self.pool.page_bytes} or more.",
                "references",
            )
            raise
        return tuple(opened)

    def _needed_pages(
        self, references: Sequence[tuple[ReadReference, float]], conditioning: PagedConditioning, *, is_guided: bool
    ) -> int:
        """Return the pages of an image that shares none."""
        tokens = [len(read.cond) for read, _ in references] * (2 if is_guided else 1)
        num_pages = sum(self.pool.num_pages_for(self.specs.unet.tenant, number) for number in tokens)
        return num_pages + sum(table.num_pages for table in (*conditioning.cond, *conditioning.uncond))

    def of_embeddings(self, embeddings: Tensor) -> Contexts:
        """Compute keys and values of embeddings directly, without the pool."""
        return self.unet.cross_attention.keys_values(embeddings.to(self.model.device, self.model.dtype))

    def check_integrity(self, num_held: int) -> None:
        """Raise PoolIntegrityError, or AssertionError if the open conditionings differ from ``num_held``."""
        self.pool.check_integrity()
        assert self.num_open == num_held, f"{self.num_open} conditionings are open for {num_held} images"


Conditioner = PlainConditioner | PagedConditioner


def image_specs(model: DiffusionModel, *, is_exact: bool) -> ImageSpecs:
    """Return the page pool specs of ``model``, for a pool that several models share.

    Pages of deterministic mode (``is_exact``) and free mode are separate, and so are those of different dtypes and
    adapters. Pages of a text encoder that several models use are shared.
    """
    suffix = f"{model.choice.dtype} {'exact' if is_exact else 'free'}"

    def identity(digest: str) -> bytes:
        return hashlib.sha256(f"{digest} {suffix}".encode()).digest()

    parts, kind = model.part_digests, "of SDXL" if model.text.is_sdxl else "alone"  # they read different layers
    encoder_digests = [f"{parts[name]} {kind}" if name in parts else model.digest for name in model.encoder_names]
    return ImageSpecs.of(model.text, model.unet, identity(model.digest), list(map(identity, encoder_digests)))


def image_tenants(model: DiffusionModel, *, is_exact: bool) -> list[ImageSpecs]:
    """Return the page pool specs of ``model`` and its refiner, if their UNets can be paged."""
    models = (model, model.refiner)
    return [image_specs(each, is_exact=is_exact) for each in models if each and not each.unet.unpaged_reason]


def uses_pages(model: DiffusionModel, config: EngineConfig) -> bool:
    """Whether keys and values of the prompts of ``model`` are kept in pages."""
    return config.cross_attention == "paged" and model.unet.unpaged_reason is None


def make_conditioner(
    model: DiffusionModel, config: EngineConfig, *, is_exact: bool, pool: PagePool | None = None
) -> Conditioner:
    """Return the conditioner for ``model`` and ``config``; with pages it creates a pool unless one is passed.

    Raises ConfigError for a pool that is too small or on another device.
    """
    if not uses_pages(model, config):
        if model.unet.unpaged_reason:
            logger.info("keys and values of prompts are computed in every step: %s", model.unet.unpaged_reason)
        return PlainConditioner(model)
    if pool is None:
        pool = make_pool(model, config, is_exact=is_exact)
    elif pool.arena.data.device.type != model.device.type:
        raise ConfigError(
            f"the page pool is on {pool.arena.data.device}, the model on {model.device}; put both on one."
        )
    return PagedConditioner(model, pool, is_exact=is_exact, cache=DiskCache.at(config.cache_dir))


def make_pool(
    model: DiffusionModel,
    config: EngineConfig,
    *,
    is_exact: bool,
    texts: Sequence[KVSpec] = (),
    max_sequences: int = 0,
    other_tenants: Sequence[tuple[Sequence[KVSpec], int]] = (),
) -> PagePool:
    """Create a pool for ``model``, its refiner and ``texts``, of ``config.kv_pool_bytes`` or of an automatic size.

    ``other_tenants`` are the specs and window tokens of models that are loaded later. Raises ConfigError if the pool is
    too small.
    """
    images = image_tenants(model, is_exact=is_exact) if config.cross_attention == "paged" else []
    all_specs = [*itertools.chain(*images), *texts]
    page_bytes = PagePlan.smallest_page_bytes([*all_specs, *itertools.chain(*(specs for specs, _ in other_tenants))])
    num_windows = HELD_ELSEWHERE if model.unet.is_hollow else AUTO_WINDOWS
    tokens = model.text.window_tokens
    num_bytes = wanted_bytes(images, texts, tokens, max_sequences, num_windows, page_bytes=page_bytes)
    num_bytes += sum(wanted_bytes([specs], (), tokens, page_bytes=page_bytes) for specs, tokens in other_tenants)
    return PagePool.for_specs(config.kv_pool_bytes or num_bytes, all_specs, page_bytes=page_bytes, device=model.device)


def wanted_bytes(
    images: Sequence[Iterable[KVSpec]],
    texts: Sequence[KVSpec],
    window_tokens: int,
    max_sequences: int = 0,
    num_windows: int = AUTO_WINDOWS,
    *,
    page_bytes: int | None = None,
) -> int:
    """Return the automatic size of a pool, in bytes.

    It holds ``num_windows`` windows of each image model while one more is being encoded, and ``max_sequences`` texts.
    ``page_bytes`` is the page size, by default the smallest for these tenants.
    """
    page_bytes = page_bytes or PagePlan.smallest_page_bytes([*itertools.chain(*images), *texts])
    per_window = [[PagePlan(spec, page_bytes).num_pages(window_tokens) for spec in specs] for specs in images]
    num_pages = sum(num_windows * unet + max(encoders) for unet, *encoders in filter(None, per_window))
    per_text = [PagePlan(spec, page_bytes).num_pages(AUTO_TEXT_TOKENS) for spec in texts]
    return page_bytes * (num_pages + max_sequences * sum(per_text))
