"""CombinedEngine: images, texts and rewritten prompts from one process, one page pool and one loop.

A tick is one call of the language model or one step of the images, as ``TimeShare`` decides. ::

    texts ───────────────────────────────────► TextEngine ──┐
    embeddings ──────────────────────────────► Embedder ────┤
    upscaling ───────────────────────────────► Upscaler ────┤
    rewrites ────────────────────► Rewriter ─► TextEngine   ├── tick ──► events
    images ────► RewriteQueue ───► Rewriter ─► TextEngine   │
      └──────────────┴───────────────────────► ImageEngines ┘

With separate stages (``config.stage``), an EncodingStage encodes the prompts of images, and a DecodingStage decodes
latents; see ``stages``.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from diffserve.api.embedding_types import EMBEDDING_TERMINAL, EmbeddingRequest
from diffserve.api.engine_stats import EngineStats, PageStats, TenantPages
from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.api.ipc import AnyEvent, AnyRequest
from diffserve.api.rewrite_types import REWRITE_TERMINAL, RewriteRequest
from diffserve.api.stage_types import STAGE_TERMINAL, DecodeRequest, EncodeRequest
from diffserve.api.text_types import TEXT_TERMINAL, LanguageModelInfo, TextEvent, TextRequest
from diffserve.api.types import TERMINAL, Cancelled, GenerationRequest, ModelInfo, ModelProfile
from diffserve.api.upscale_types import UPSCALE_TERMINAL, UpscaleRequest
from diffserve.engine.base_engine import TickLoop
from diffserve.engine.embedder import Embedder
from diffserve.engine.image.engine import Engine
from diffserve.engine.image.engines import ImageEngines
from diffserve.engine.records import FailureReason
from diffserve.engine.rewrite_queue import RewriteQueue
from diffserve.engine.stages import DecodingStage, EncodingStage, RequestQueue, trial_latents
from diffserve.engine.text import TextEngine, TickBudget
from diffserve.engine.time_share import TimeShare
from diffserve.engine.upscaler import UpscalerQueue
from diffserve.runtime.device_health import raise_if_sticky
from diffserve.runtime.kv import PagePool, PoolStats, TenantStats
from diffserve.settings.config import EngineConfig, Settings, TextSettings

if TYPE_CHECKING:
    from diffserve.engine.rewriter import Rewriter


logger = logging.getLogger(__name__)

TENANT_FIELDS = TenantPages.__struct_fields__[1:]  # but its name


class Side(enum.Enum):
    """Engine that owns a request."""

    IMAGES = "images"
    TEXTS = "texts"


class CombinedEngine(TickLoop[AnyRequest, AnyEvent]):
    """Image, text, rewriting and embedding engines behind one tick loop and one page pool.

    Thread-safe. A tick that raises fails the requests of its side only. ``engine`` and ``texts`` share one page
    pool; ``rewriter`` is None if the language model has no chat template; ``time_share`` is described in
    ``config.TextSettings``.
    """

    terminal = (
        *TERMINAL, *TEXT_TERMINAL, *REWRITE_TERMINAL, *EMBEDDING_TERMINAL, *UPSCALE_TERMINAL, *STAGE_TERMINAL
    )  # fmt: skip

    def __init__(
        self,
        engine: Engine | ImageEngines,
        texts: TextEngine | None = None,
        rewriter: Rewriter | None = None,
        *,
        time_share: float = TextSettings().time_share,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self.images = ImageEngines(engine, clock=clock) if isinstance(engine, Engine) else engine
        self.texts = texts
        self.rewriter = rewriter
        self.share = TimeShare(time_share)
        self._clock = clock
        stage, max_waiting = self.images.config.stage, self.images.config.max_waiting
        self._encoding = EncodingStage(self.images, max_waiting, clock) if stage == "encode" else None
        self._decoding = DecodingStage(self.images, max_waiting, clock) if stage == "decode" else None
        self._pending = RewriteQueue(self._encoding or self.images, self.images, rewriter, clock)
        self._embedder = Embedder(self.images, clock)
        self._upscaler = UpscalerQueue(self.images, clock)
        stages = (self._embedder, self._upscaler, self._encoding, self._decoding)
        self._stages: list[RequestQueue[Any]] = [stage for stage in stages if stage is not None]
        turns: list[tuple[TextEngine | RequestQueue[Any] | None, Callable[[], None]]] = [
            (self._embedder, self._embed),
            (self._upscaler, self._upscale),
            (texts, self._continue_texts),
            (self._encoding, self._encode),
            (self._decoding, self._decode),
        ]
        self._turns = [(queue, turn) for queue, turn in turns if queue is not None]  # the latest comes last
        self._live: dict[str, Side] = {}  # guarded by the lock of the mail

    @classmethod
    def from_settings(cls, settings: Settings) -> CombinedEngine:
        """Load the models that ``settings`` name; raises the errors of ``load``."""
        serve = settings.serve
        return cls.load(
            settings.model, settings.engine, settings.text, settings.models, unload_after_s=serve.unload_after_s
        )

    @classmethod
    def load(
        cls,
        model: ModelProfile,
        engine: EngineConfig,
        text: TextSettings,
        other_models: Sequence[ModelProfile] = (),
        *,
        unload_after_s: float = 0.0,
    ) -> CombinedEngine:
        """Load an image model and, if ``text`` names one, a language model, with one page pool.

        ``other_models`` are loaded when requests name them (see ``engine.image.engines``). Raises ModelNotFound,
        ModelLoadError or ConfigError about ``model`` and the language model.
        """
        from diffserve.engine.loading import load_parts

        parts = load_parts(model, engine, text, other_models, unload_after_s=unload_after_s)
        return cls(*parts, time_share=text.time_share)

    # What it is ---------------------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """Return the first image model."""
        return self.images.info

    @property
    def engine(self) -> Engine:
        """Return the engine of the first image model; raise ModelNotFound while it is not loaded."""
        return self.images.first

    @property
    def text_info(self) -> LanguageModelInfo | None:
        """Return the language model, or None."""
        return None if self.texts is None else self.texts.info

    @property
    def pool(self) -> PagePool | None:
        """Return the shared page pool, or None."""
        return self.images.pool if self.texts is None else self.texts.pool

    @property
    def has_work(self) -> bool:
        """Whether a tick would do or deliver something."""
        return bool(self._outbox) or self._wants_images or self._wants_texts or self.images.is_awaited

    @property
    def num_live(self) -> int:
        """Requests accepted and not yet over."""
        return len(self._live)

    def stats(self) -> EngineStats:
        """Return a snapshot for the metrics."""
        return EngineStats(
            num_live=self.num_live,
            num_wishes=len(self._pending),
            images=self.images.stats(),
            models=self.images.model_stats(),
            share=self.share.stats(),
            texts=None if self.texts is None else self.texts.stats(),
            pages=self._page_stats(),
        )

    # The verbs ----------------------------------------------------------------------------------------------------

    def _enter(self, request: AnyRequest, *, is_followed: bool) -> str:
        side = Side.IMAGES if isinstance(request, GenerationRequest) else Side.TEXTS
        with self._entering(request.request_id, side, is_followed=is_followed):
            match request:
                case EncodeRequest(generation=generation):
                    if self._encoding is None:
                        raise _not_here("encode texts")
                    (self._encoding if generation.rewriting is None else self._pending).submit(generation)
                case DecodeRequest():
                    if self._decoding is None:
                        raise _not_here("decode latents")
                    self._decoding.submit(request)
                case GenerationRequest() if self._encoding or self._decoding:
                    raise _not_here("paint")
                case GenerationRequest(rewriting=None):
                    self.images.submit(request)
                case GenerationRequest():
                    self._pending.submit(request)
                case TextRequest():
                    self._writer().submit(request)
                case EmbeddingRequest():
                    self._embedder.submit(request)
                case UpscaleRequest():
                    if self.images.config.stage not in ("all", "decode"):
                        raise _not_here("upscale")
                    self._upscaler.submit(request)
                case RewriteRequest():
                    writer = self._writer()
                    if self.rewriter is None:
                        raise InvalidRequest(
                            f"the language model {writer.info.model_id!r} has no chat template and cannot rewrite; "
                            "set [text] model to the directory of an instruct model.",
                            param="model",
                        )
                    self.rewriter.submit(request)
        self._post(self._pending.release())
        return request.request_id

    def _writer(self) -> TextEngine:
        if self.texts is None:
            raise InvalidRequest(
                "no language model is loaded; start the server with [text] model set to a directory.", param="model"
            )
        return self.texts

    def cancel(self, request_id: str) -> bool:
        """Cancel a request and free its resources; return False if it is not live."""
        if request_id not in self._live:
            return False
        if self._pending.cancel(request_id) or any(queue.cancel(request_id) for queue in self._stages):
            self._post([Cancelled(request_id=request_id)])
            return True
        if self._live.get(request_id) is Side.IMAGES:
            return self.images.cancel(request_id)
        is_rewrite = self.rewriter is not None and self.rewriter.cancel(request_id)
        return is_rewrite or (self.texts is not None and self.texts.cancel(request_id))

    def interrupt(self, request_id: str) -> bool:
        """End an image request early with unfinished images; cancel any other. Return False if it is not live."""
        if self._live.get(request_id) is Side.IMAGES and self.images.interrupt(request_id):
            return True
        return self.cancel(request_id)

    def warm_up(self) -> None:
        """Run the first calls of every network before the first request."""
        from diffserve.engine.loading import warm_up

        self.images.first.warm_up()
        warm_up(self.texts, self.rewriter)

    def try_out(self, request: GenerationRequest) -> None:
        """Run ``request`` once, or the part of it that this stage computes; raise its errors."""
        match self.images.config.stage:
            case "all":
                self.images.first.generate(request)
            case "encode":
                self._answer([EncodeRequest(generation=request)])
            case "decode":
                self._answer([trial_latents(self.images.first)])
            case _:  # the calls of the UNet were tried while they were measured
                pass

    def study(self, has_arrived: Callable[[], bool] | None = None) -> bool:
        """Use idle time for one UNet call, interrupted once ``has_arrived``; return whether there was one to make."""
        return self.images.study(has_arrived)

    def check_integrity(self) -> None:
        """Raise AssertionError or PoolIntegrityError if a page, slot, image or text is lost."""
        with self._ticking:
            self.images.check_integrity()
            if self.texts is not None:
                self.texts.check_integrity()
            self._pending.check_integrity()

    # Turns --------------------------------------------------------------------------------------------------------

    @property
    def _wants_images(self) -> bool:
        return self.images.has_work or self._pending.has_ready

    @property
    def _wants_texts(self) -> bool:
        return any(queue.has_work for queue, _ in self._turns)

    def _tick_once(self) -> None:
        """One call of the language model or one step of the images.

        An image whose rewriting ends in this tick is with the engine when it returns.
        """
        if self._wants_texts and (self.share.is_texts_turn or not self._wants_images):
            self._guarded(Side.TEXTS, self._write)
        elif self._wants_images or self.images.is_awaited:
            self._guarded(Side.IMAGES, self._paint)
        self._post(self._pending.release())

    def _page_stats(self) -> PageStats | None:
        with self._ticking:
            return None if self.pool is None else page_stats(self.pool.stats())

    def _write(self) -> None:
        """Run one call of the language model, a text encoder, an upscaler or a VAE, whichever is next."""
        for place, (queue, turn) in enumerate(self._turns):
            if queue.has_work:
                self._turns.append(self._turns.pop(place))
                turn()
                return

    def _embed(self) -> None:
        """Run one call of a text encoder."""
        is_shared, started_s = self._wants_images, self._clock()
        self._post(self._embedder.tick())
        if is_shared:
            self.share.record_text_call(self._clock() - started_s, has_moved=self._embedder.has_moved)

    def _upscale(self) -> None:
        """Upscale one tile of an image."""
        is_shared, started_s = self._wants_images, self._clock()
        self._post(self._upscaler.tick())
        if is_shared:
            self.share.record_text_call(self._clock() - started_s, has_moved=True)

    def _encode(self) -> None:
        """Encode the texts of one image."""
        assert self._encoding is not None
        self._post([self._pending.with_rewrite(event) for event in self._encoding.tick()])

    def _decode(self) -> None:
        """Decode one image."""
        assert self._decoding is not None
        self._post(self._decoding.tick())

    def _continue_texts(self) -> None:
        """Run one call of the language model, limited to what image steps earn while images wait.

        No text is admitted while an image waits for pages.
        """
        assert self.texts is not None
        is_shared = self._wants_images
        budget = TickBudget()
        if is_shared:
            admits = self.share.admits_texts and not self.images.waits_for_pages
            budget = TickBudget(time_s=self.share.call_s, admits=admits)
        started_s = self._clock()
        events: list[TextEvent] = self.texts.tick(budget)
        if self.rewriter is not None:
            rewritten, events = self.rewriter.feed(events)
            self._post([event for event in rewritten if not self._pending.handle(event)])
        self._post(events)
        if is_shared:
            self.share.record_text_call(self._clock() - started_s, has_moved=self.texts.last_tick is not None)

    def _paint(self) -> None:
        """Run one step of the images."""
        is_shared = self._wants_texts
        started_s = self._clock()
        self._post([self._pending.with_rewrite(event) for event in self.images.tick()])
        tick = self.images.last_tick
        has_moved = tick is not None and bool(tick.num_rows or tick.num_decoded)
        self.share.record_image_step(self._clock() - started_s, has_moved=has_moved, is_shared=is_shared)

    def _guarded(self, side: Side, turn: Callable[[], None]) -> None:
        """Run one turn; if it raises, fail the requests of its side."""
        try:
            turn()
        except Exception as error:
            raise_if_sticky(error)
            logger.error("a tick of the %s failed as a whole", side.value, exc_info=error)
            self._give_up(
                side, FailureReason(DiffserveError.default_code, f"a tick raised {type(error).__name__}: {error}")
            )

    def _give_up(self, side: Side, failure: FailureReason) -> None:
        """Fail all requests of ``side``; raise if the page pool is inconsistent afterwards."""
        failed_ids = [request_id for request_id, owner in list(self._live.items()) if owner is side]
        if side is Side.TEXTS:
            if self.texts is not None:
                self.texts.fail_all(failure)
            for queue in self._stages:
                queue.fail_all()
            self._pending.give_up_rewriting()
        else:
            failed_ids = self.images.fail_active(
                failure, [name for name in failed_ids if not self._pending.holds(name)]
            )
        self._post([failure.of(name) for name in failed_ids])
        if self.pool is not None:
            self.pool.check_integrity()

    # Books --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _entering(self, request_id: str, side: Side, *, is_followed: bool) -> Iterator[None]:
        """Register ``request_id`` as live, and remove it if the body raises."""
        with self._lock:
            if request_id in self._live:
                raise InvalidRequest(f"request_id {request_id!r} is already in use.", param="request_id")
            self._live[request_id] = side
            if is_followed:
                self._mailboxes[request_id] = deque()
        try:
            yield
        except BaseException:
            with self._lock:
                self._live.pop(request_id, None)
                self._mailboxes.pop(request_id, None)
            raise

    def _post(self, events: Sequence[AnyEvent]) -> None:
        """Deliver events of live requests; events of finished or cancelled requests are dropped."""
        with self._lock:
            for event in events:
                if event.request_id in self._live:
                    self._deliver([event])
                    if isinstance(event, self.terminal):
                        del self._live[event.request_id]


def _not_here(what: str) -> InvalidRequest:
    return InvalidRequest(f"this process does not {what}: its engine.stage is different.", param="model")


def page_stats(stats: PoolStats) -> PageStats:
    """Convert pool statistics for transport; tenants of one kind are summed because their names contain digests."""
    of_kind = defaultdict[str, list[TenantStats]](list)
    for name, tenant in stats.tenants.items():
        of_kind[name.partition(":")[0]].append(tenant)
    return PageStats(
        num_pages=stats.num_pages,
        page_bytes=stats.page_bytes,
        free_pages=stats.free_pages,
        tenants=tuple(
            TenantPages(
                tenant=kind, **{field: sum(getattr(tenant, field) for tenant in tenants) for field in TENANT_FIELDS}
            )
            for kind, tenants in sorted(of_kind.items())
        ),
    )
