"""The text engine on a postcard: one tick = plan, run, apply. Pool, clock and budget come from outside."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from diffserve.engine.text.cost import TokenCost
from diffserve.engine.text.pages import SequencePages
from diffserve.engine.text.plan import TextOutcome, TextPlan, TextTick, TickBudget
from diffserve.engine.text.runners import TextRunners, failure_of
from diffserve.engine.text.scheduler import TextScheduler
from diffserve.errors import ConfigError
from diffserve.runtime.kv import PagePool
from diffserve.runtime.language import LanguageModel, LanguageRunner
from diffserve.text_types import TextConfig, TextEvent, TextStats

logger = logging.getLogger(__name__)

NO_LIMIT: Final = TickBudget()
LEAST_TOKENS: Final = 16


class TextCore:
    """Scheduler and runners of one language model on ``pool``, driven by one thread at a time.

    draft_model  proposes what ``model`` checks; it must share its vocabulary. Its pages are a tenant of their own.
    tenant       the name under which the model's pages are in the pool; the draft's is ``tenant`` + "_draft"

    Raises ConfigError when the two models do not fit, ValueError when a page is too small for a layer.
    """

    def __init__(
        self,
        model: LanguageModel,
        pool: PagePool,
        config: TextConfig | None = None,
        *,
        draft_model: LanguageModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
        tenant: str = "llm",
    ) -> None:
        self.model = model
        self.config = config or TextConfig()
        self.clock = clock
        self.pool = pool
        page_tokens = self.config.page_tokens
        runner = LanguageRunner(model, pool, tenant=tenant, page_tokens=page_tokens)
        draft_runner = None
        if draft_model is not None:
            check_draft(model, draft_model)
            draft_runner = LanguageRunner(draft_model, pool, tenant=draft_tenant(tenant), page_tokens=page_tokens)
        self.pages = SequencePages(pool, tenant, draft_runner.tenant if draft_runner else None)
        self.scheduler = TextScheduler(self.config, self.pages, model, draft_model)
        self.runners = TextRunners(runner, draft_runner, clock)
        self.cost = TokenCost()
        self.trace: deque[TextTick] = deque(maxlen=self.config.trace_ticks)
        self._num_computed = 0
        self._busy_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a tick would do something."""
        return self.scheduler.has_work

    def tick(self, take_cancelled: Callable[[], list[str]] = list, budget: TickBudget = NO_LIMIT) -> list[TextEvent]:
        """One call of the network for whoever fits into ``budget``.

        Cancellations are taken before the plan and before its result.
        """
        started_s = self.clock()
        events = self._cancel(take_cancelled()) + self.scheduler.expire(started_s)
        plan = self.scheduler.plan(self.max_tokens(budget), admits=budget.admits)
        outcome = self._run(plan)
        events += self._cancel(take_cancelled())
        now_s = self.clock()
        events += self.scheduler.apply(plan, outcome, now_s)
        self._remember(plan, outcome, now_s - started_s)
        return events

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

    def stats(self) -> TextStats:
        """Counters for the metrics."""
        scheduler, drafts = self.scheduler, self.scheduler.drafts
        return TextStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            output_tokens=scheduler.progress.num_said,
            computed_tokens=self._num_computed,
            draft_tokens=drafts.num_drafted,
            accepted_tokens=drafts.num_right,
            preemptions=scheduler.num_preempted,
            entropy_sum=scheduler.progress.entropy_sum,
            busy_s=self._busy_s,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError or PoolIntegrityError when a page or a text has been lost."""
        self.scheduler.check_integrity()

    def _cancel(self, request_ids: list[str]) -> list[TextEvent]:
        return [event for request_id in request_ids for event in self.scheduler.cancel(request_id)]

    def _run(self, plan: TextPlan) -> TextOutcome:
        """What cannot be blamed on one text fails the texts of this tick, and the engine lives on."""
        try:
            return self.runners.run(plan)
        except Exception as error:
            logger.error("a tick failed as a whole")
            return TextOutcome(failures=dict.fromkeys(plan.tasks, failure_of(error)))

    def _remember(self, plan: TextPlan, outcome: TextOutcome, wall_s: float) -> None:
        if not plan.pieces:
            return
        self._busy_s += wall_s
        self._num_computed += plan.num_tokens
        self.cost.learn(plan.num_tokens, outcome.forward_s)
        self.trace.append(
            TextTick(
                tick=self.scheduler.num_ticks,
                rows=tuple(
                    (piece.task.live.request_id, piece.task.text_index, piece.num_tokens, len(piece.draft))
                    for piece in plan.pieces
                ),
                wall_s=wall_s,
            )
        )


def draft_tenant(tenant: str) -> str:
    """Where the pages of the draft model of ``tenant`` are."""
    return f"{tenant}_draft"


def check_draft(model: LanguageModel, draft_model: LanguageModel) -> None:
    """Raises ConfigError unless a token of the draft model means the same to the model."""
    own, other = model.info, draft_model.info
    if own.vocab_size != other.vocab_size or model.tokenizer.get_vocab() != draft_model.tokenizer.get_vocab():
        raise ConfigError(
            f"the draft model {other.model_id!r} has another vocabulary ({other.vocab_size} tokens) than "
            f"{own.model_id!r} ({own.vocab_size}): give one of the same family, or none.",
            param="draft_model",
        )
