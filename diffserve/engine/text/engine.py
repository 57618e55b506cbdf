"""Text engine: its tick, and its public interface."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from diffserve.api.bounds import check
from diffserve.api.errors import ConfigError, DeadlineUnreachable
from diffserve.api.json_schemas import no_json
from diffserve.api.pace import TokenCost
from diffserve.api.text_types import (
    TEXT_TERMINAL,
    LanguageModelInfo,
    TextAccepted,
    TextConfig,
    TextEvent,
    TextFinished,
    TextRequest,
    TextStats,
)
from diffserve.engine.base_engine import BaseEngine, failure_of
from diffserve.engine.records import FailureReason, Stage, TickBudget, shares
from diffserve.engine.text.admission import TextAdmission
from diffserve.engine.text.pages import SequencePages
from diffserve.engine.text.runner import TextRunner
from diffserve.engine.text.scheduler import TextScheduler
from diffserve.engine.text.task import LiveText, TextOutcome, TextPlan, TextTask, TextTick
from diffserve.runtime.accelerators import has_streams
from diffserve.runtime.decoding import AnyConstraint, JsonConstraints
from diffserve.runtime.kv import PagePool
from diffserve.runtime.language import LanguageModel, LanguageRunner, load_language_model

POOL_BYTES = 256 << 20
LEAST_TOKENS: Final = 16
COMPILE_POLL_S: Final = 0.001
"""Seconds between two looks at a schema that is being compiled, while there is nothing else to do."""

Order = tuple[TextRequest, AnyConstraint | None]


class Unread(NamedTuple):
    """A tick whose tokens are chosen and not read, and when the device got it, in seconds of the clock."""

    plan: TextPlan
    outcome: TextOutcome
    started_s: float


class TextEngine(BaseEngine[Order, LiveText, TextEvent]):
    """Continues texts in mixed batches; requests are handled as in ``Engine``.

    Args:
        model: The language model.
        pool: The page pool of the model and of its draft model.
        config: How to batch.
        draft_model: Proposes tokens that ``model`` checks; it must have the same vocabulary. Its pages are a tenant of
            their own, ``tenant`` + "_draft".
        clock: In seconds.
        tenant: The name of the model's pages in the pool.
        reads_late: Whether tokens are read a tick after they were chosen, where no policy needs them earlier: the
            device continues from them meanwhile, and a token computed beyond an end is dropped. By default on
            asynchronous devices. Texts are the same.

    Raises:
        ConfigError: The two models do not fit.
        ValueError: A page is too small for a layer.
    """

    doing = "computing this text"
    outcome = TextOutcome
    terminal = TEXT_TERMINAL

    def __init__(
        self,
        model: LanguageModel,
        pool: PagePool,
        config: TextConfig | None = None,
        *,
        draft_model: LanguageModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
        tenant: str = "llm",
        reads_late: bool | None = None,
    ) -> None:
        self.model = model
        self.config = config or TextConfig()
        super().__init__(self.config.max_waiting, clock)
        self.pool = pool
        page_tokens = self.config.page_tokens
        runner = LanguageRunner(model, pool, tenant=tenant, page_tokens=page_tokens)
        draft_runner = None
        if draft_model is not None:
            check_draft(model, draft_model)
            draft_runner = LanguageRunner(draft_model, pool, tenant=draft_tenant(tenant), page_tokens=page_tokens)
        self.pages = SequencePages(pool, tenant, draft_runner.tenant if draft_runner else None)
        self.scheduler: TextScheduler = TextScheduler(self.config, self.pages, model, draft_model)
        self.runners: TextRunner = TextRunner(runner, draft_runner, clock)
        self.cost = TokenCost()
        self._read_s = -math.inf
        self._is_shared = False
        if reads_late is None:
            reads_late = has_streams(model.device) or model.device.type == "meta"
        self.reads_late = reads_late
        self._unread: Unread | None = None
        self._num_computed = 0
        self._refused: list[tuple[LiveText, FailureReason]] = []
        self._admission = TextAdmission(model, self.pages, self.config)
        self._schemas = None if model.spelling is None else JsonConstraints(model.spelling)

    @classmethod
    def from_model(
        cls,
        model: LanguageModel,
        config: TextConfig | None = None,
        *,
        draft_model: LanguageModel | None = None,
        pool_bytes: int = POOL_BYTES,
    ) -> TextEngine:
        """Create an engine with its own page pool of at most ``pool_bytes``. Raises ConfigError if it is too small."""
        page_tokens = (config or TextConfig()).page_tokens
        specs = [model.spec("llm", page_tokens=page_tokens)]
        if draft_model is not None:
            specs.append(draft_model.spec(draft_tenant("llm"), page_tokens=page_tokens))
        pool = PagePool.for_specs(pool_bytes, specs, device=model.device)
        return cls(model, pool, config, draft_model=draft_model)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        config: TextConfig | None = None,
        pool_bytes: int = POOL_BYTES,
    ) -> TextEngine:
        """Load a model directory. Raises the errors of ``load_language_model``."""
        model = load_language_model(path, dtype=dtype, device=device)
        return cls.from_model(model, config, pool_bytes=pool_bytes)

    @property
    def info(self) -> LanguageModelInfo:
        """Capabilities of the model and its device."""
        return self.model.info

    def stats(self) -> TextStats:
        """Counters for the metrics."""
        with self._ticking:
            scheduler, drafts = self.scheduler, self.scheduler.drafts
            return TextStats(
                num_running=scheduler.num_running,
                num_waiting=len(scheduler.waiting),
                prompt_tokens=scheduler.num_prompt_tokens,
                cached_tokens=scheduler.num_cached_tokens,
                output_tokens=scheduler.progress.num_output_tokens,
                computed_tokens=self._num_computed,
                draft_tokens=drafts.num_drafted,
                accepted_tokens=drafts.num_right,
                preemptions=scheduler.running.num_preempted,
                entropy_sum=scheduler.progress.entropy_sum,
                busy_s=self._busy_s,
            )

    def submit(  # type: ignore[override]  # an order is both
        self, request: TextRequest, *, constraint: AnyConstraint | None = None
    ) -> str:
        """Queue ``request`` and return its id. ``constraint`` limits the tokens that may be generated.

        Raises InvalidRequest (PoolTooSmall among them) and QueueFull.
        """
        return self._enter((request, constraint), is_followed=False)

    def generate(
        self, request: str | TextRequest | Sequence[TextRequest], *, constraint: AnyConstraint | None = None
    ) -> list[TextFinished]:
        """Continue texts and return one answer for each request, in order; a list may be longer than ``max_waiting``.

        Raises the errors of ``submit`` except QueueFull, and for a request that failed DeadlineExceeded,
        NumericalError, InvalidRequest or DiffserveError.
        """
        if isinstance(request, str):
            request = TextRequest(prompt=request, deltas=False)
        requests = [request] if isinstance(request, TextRequest) else list(request)
        histories = self._answer([(text_request, constraint) for text_request in requests])
        return [history[-1] for history in histories if isinstance(history[-1], TextFinished)]

    def stream(self, request: str | TextRequest, *, constraint: AnyConstraint | None = None) -> Iterator[TextEvent]:
        """Yield the events of a request up to its terminal one; closing the iterator cancels the request."""
        if isinstance(request, str):
            request = TextRequest(prompt=request)
        return self._watch((request, constraint))

    def max_tokens(self, budget: TickBudget) -> int:
        """Tokens that a call may take under ``budget``, at least 1.

        The time limits prompts and drafts, never below ``LEAST_TOKENS``; sequences that decode get their token anyhow,
        because one row more in a call is nearly free.
        """
        limits = [self.config.max_batch_tokens]
        if budget.max_tokens is not None:
            limits.append(budget.max_tokens)
        if budget.time_s is not None:
            affordable = self.cost.max_tokens(budget.time_s) or self.config.max_batch_tokens
            limits.append(max(affordable, LEAST_TOKENS, self.scheduler.num_decoding))
        return max(1, min(limits))

    def admit(self, order: Order) -> LiveText:
        """Validate and resolve ``order``; raise InvalidRequest if it is not acceptable."""
        request, constraint = order
        self.scheduler.drafts.check(request)
        live = self._admission.admit(request, self.clock(), constraint)
        schema = request.params.json_schema
        if schema is not None:
            check(
                constraint is None, "json_schema and a constraint cannot be combined; give one of them.", "json_schema"
            )
            if self._schemas is None:
                raise no_json(self.info.model_id, "json_schema")
            live.compiling = self._schemas.begin(schema)
        return live

    def _take_inbox(self) -> None:
        super()._take_inbox()
        refused, self._refused = self._refused, []
        for live, failure in refused:
            self._deliver(self.scheduler.give_up(live, failure))

    def _is_ready(self, live: LiveText) -> bool:
        """Whether the request's schema is compiled; an error in compiling fails the request at once."""
        compiling = live.compiling
        if compiling is None:
            return True
        if not compiling.done():
            return self.clock() - live.submitted_s > (live.request.deadline_s or math.inf)
        try:
            live.constrain(compiling.result())
        except Exception as error:
            self._refused.append((live, failure_of(error, "compiling this schema")))
        return True

    def _check_deadline(self, live: LiveText) -> None:
        """Raise DeadlineUnreachable if the prompt cannot be computed in time; the length of the answer is unknown."""
        deadline_s, (fixed_s, per_token_s) = live.request.deadline_s, self.cost.line
        if deadline_s is None or not per_token_s:
            return
        first_tasks = [
            task for other in (*self._inbox.values(), *dict(self.scheduler.live).values()) for task in other.tasks[:1]
        ]
        ahead = sum(pending_tokens(task) for task in first_tasks if self.scheduler.is_before(task, live))
        num_prompt_tokens = pending_tokens(live.tasks[0])

        def seconds(num_tokens: int) -> float:
            num_calls = math.ceil(num_tokens / self.config.max_batch_tokens)
            return num_calls * fixed_s + num_tokens * per_token_s

        if seconds(ahead + num_prompt_tokens) > deadline_s:
            raise DeadlineUnreachable.of(deadline_s, seconds(ahead + num_prompt_tokens), seconds(num_prompt_tokens))

    def _accepted(self, live: LiveText, num_ahead: int) -> TextEvent:
        return TextAccepted(
            request_id=live.request_id,
            seed=live.seed,
            num_texts=live.request.num_texts,
            num_prompt_tokens=len(live.prompt_ids),
            queue_position=num_ahead,
        )

    def _plan(self, budget: TickBudget) -> TextPlan:
        self._is_shared = budget.time_s is not None
        plan = self.scheduler.plan(self.max_tokens(budget), admits=budget.admits)
        if self._inbox and not plan.pieces and not self._is_shared:
            time.sleep(COMPILE_POLL_S)
        return plan

    def _apply(self, plan: TextPlan, outcome: TextOutcome, started_s: float) -> list[TextEvent]:
        events = self._read_late()
        now_s = self.clock()
        # shared engines charge device time, so all tokens are read at once
        if self.reads_late and not self._is_shared and self.scheduler.may_go_unread(outcome):
            charged_s = self._charge(plan, started_s)
            if self.scheduler.go_unread(plan, outcome, now_s):
                self._unread = Unread(plan, outcome, max(started_s, now_s - outcome.forward_s))
            is_known = False
        else:
            waited_s = self.clock()
            self.runners.read(outcome)
            now_s = self.clock()
            outcome.forward_s += now_s - waited_s
            charged_s = self._charge(plan, started_s)
            events += self.scheduler.apply(plan, outcome, now_s)
            is_known = True
        self._remember(plan, outcome, now_s - started_s, is_known=is_known)
        self._owed_s += now_s - started_s - charged_s if plan.pieces else 0.0
        return events

    def _charge(self, plan: TextPlan, started_s: float) -> float:
        """Charge the time of this tick, and the unpaid rest of the previous one, to requests by their tokens.

        Rejected draft tokens count as well. Returns the seconds charged.
        """
        if not plan.pieces:
            return 0.0
        spent_s = self.clock() - started_s
        tokens: Counter[LiveText] = Counter()
        for piece in plan.pieces:
            tokens[piece.task.live] += piece.num_tokens
        for live, share_s in shares(spent_s + self._owed_s, tokens).items():
            live.device_s += share_s
        self._owed_s = 0.0
        return spent_s

    def _read_late(self) -> list[TextEvent]:
        """Read the tokens of the previous tick if they are unread, and return its events."""
        if self._unread is None:
            return []
        plan, outcome, started_s = self._unread
        self._unread = None
        if not any(task.stage is Stage.RUNNING for task in plan.tasks):
            return []
        self.runners.read(outcome)
        now_s = self.clock()
        self.cost.learn(plan.num_tokens, now_s - max(started_s, self._read_s))
        self._read_s = now_s
        return self.scheduler.apply_read(outcome, now_s)

    def _remember(self, plan: TextPlan, outcome: TextOutcome, wall_s: float, *, is_known: bool) -> None:
        """Record a tick; ``is_known`` tells whether its duration is known already."""
        if not plan.pieces:
            return
        self._busy_s += wall_s
        self._num_computed += plan.num_tokens
        if is_known:
            self.cost.learn(plan.num_tokens, outcome.forward_s)
        self._trace.append(
            TextTick(
                tick=self.scheduler.num_ticks,
                rows=tuple(
                    (piece.task.live.request_id, piece.task.text_index, piece.num_tokens, len(piece.draft))
                    for piece in plan.pieces
                ),
                wall_s=wall_s,
            )
        )


def pending_tokens(task: TextTask) -> int:
    """Tokens of its prompt that are still to be read."""
    return 0 if task.stage is Stage.DONE or task.is_decoding else task.sequences[0].num_pending


def draft_tenant(tenant: str) -> str:
    """Return the tenant name of the draft model's pages for ``tenant``."""
    return f"{tenant}_draft"


def check_draft(model: LanguageModel, draft_model: LanguageModel) -> None:
    """Raise ConfigError unless both models have the same vocabulary."""
    info, draft_info = model.info, draft_model.info
    if info.vocab_size != draft_info.vocab_size or model.tokenizer.get_vocab() != draft_model.tokenizer.get_vocab():
        raise ConfigError(
            f"the draft model {draft_info.model_id!r} has a different vocabulary ({draft_info.vocab_size} tokens) than "
            f"{info.model_id!r} ({info.vocab_size}): give one of the same family, or none.",
            param="draft_model",
        )
