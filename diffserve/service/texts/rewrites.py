"""``POST /v1/prompts/rewrite``: prompts for a wish."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from diffserve.api.bounds import check
from diffserve.api.errors import DiffserveError
from diffserve.api.rewrite_types import Rewrite, RewriteDelta, RewriteFinished, RewriteRequest
from diffserve.api.types import RewriteOptions
from diffserve.service.admission import Ticket
from diffserve.service.endpoint import Endpoint, RequestPlan
from diffserve.service.http.addresses import share_of
from diffserve.service.http.bodies import show
from diffserve.service.http.streams import Events, event
from diffserve.service.lifecycle import json_response
from diffserve.service.models import check_language_model
from diffserve.service.texts.completions import usage
from diffserve.service.texts.schemas import RewriteBody, RewriterChoice, styles
from diffserve.settings.config import ServeConfig

DELTA, COMPLETED = "prompt_rewrite.delta", "prompt_rewrite.completed"


class RewritePlan(RequestPlan, frozen=True, kw_only=True):
    """RequestPlan body: the rewriter's request."""

    request: RewriteRequest


class RewriteEndpoint(Endpoint[RewriteBody, RewritePlan]):
    """Endpoint of prompt rewriting."""

    asks = "chat"
    body = RewriteBody

    async def _plan(self, body: RewriteBody, request: Request, client: str) -> RewritePlan:
        check_language_model(body.model, self._engine.text_info, self._engine.models)
        name, share = request.state.request_id, share_of(request)
        return plan_rewrite(body, self._config, name, client=client, share=share)

    def _admit(self, plan: RewritePlan, client: str) -> AbstractContextManager[Ticket]:
        return self._backlog.entered(client, plan.request.num_prompts, priority=plan.request.priority)

    async def _answer(self, plan: RewritePlan, ticket: Ticket) -> Response:
        async with self._engine.submit(plan.request, partial(ticket.watch_texts, 0), is_whole=True) as job:
            async for event_ in job:
                if isinstance(event_, RewriteFinished):
                    return json_response(msgspec.json.encode(answer_of(plan, event_)), plan.warnings)
        raise DiffserveError("the rewriter finished without an answer.")

    async def _events(self, plan: RewritePlan, ticket: Ticket) -> Events:
        async with self._engine.submit(plan.request, partial(ticket.watch_texts, 0)) as job:
            async for event_ in job:
                match event_:
                    case RewriteDelta():
                        delta = {"type": DELTA, "id": event_.request_id, "index": event_.index, "delta": event_.text}
                        yield event(delta, DELTA)
                    case RewriteFinished():
                        yield event({"type": COMPLETED, **answer_of(plan, event_)}, COMPLETED)


def plan_rewrite(
    body: RewriteBody, config: ServeConfig, request_id: str, *, client: str = "", share: float = 1.0
) -> RewritePlan:
    """Convert ``body`` to an engine request. Raises InvalidRequest."""
    request = RewriteRequest(
        wish=body.prompt,
        num_prompts=body.n or 1,
        options=options_of(body, "style"),
        deltas=bool(body.stream),
        **body.urgency(config.request_timeout_s),
        client=client,
        share=share,
        request_id=f"rwt-{request_id.rpartition('-')[2]}",
    )
    return RewritePlan(request=request, is_stream=bool(body.stream), warnings=tuple(body.warnings), price=config.price)


def answer_of(plan: RewritePlan, finished: RewriteFinished) -> dict[str, Any]:
    """Format the response, with one entry for each prompt."""
    return {
        "id": finished.request_id,
        "object": "prompt.rewrite",
        "created": int(time.time()),
        "model": finished.model,
        "style": finished.style,
        "data": [_entry(plan.request.wish, rewrite) for rewrite in finished.rewrites],
        "usage": usage(plan, [finished.usage]),
        "timings": {name: round(getattr(finished.timings, name), 6) for name in finished.timings.__struct_fields__},
        "warnings": list(plan.warnings),
    }


def _entry(wish: str, rewrite: Rewrite) -> dict[str, Any]:
    """Format one prompt; ``revised_prompt`` is null if the wish is used unchanged."""
    return {
        "prompt": wish,
        "revised_prompt": None if rewrite.prompt == wish else rewrite.prompt,
        "warning": rewrite.warning,
        "fallback": rewrite.fallback,
        "mean_entropy": rewrite.mean_entropy,
    }


def options_of(choice: RewriteBody | RewriterChoice, param: str) -> RewriteOptions:
    """Return the rewriting options of ``choice``. Raises InvalidRequest about ``param`` for an unknown style."""
    message = f"{param} is {show(choice.style)}; it must be one of {', '.join(styles())}, or left out."
    check(choice.style is None or choice.style in styles(), message, param, "unknown_style")
    return RewriteOptions(
        style=choice.style,
        seed=None if choice.seed in (None, -1) else choice.seed,
        system=choice.system,
        force=bool(choice.force),
    )
