"""``POST /v1/embeddings``: normalized, pooled outputs of an image model's text encoder."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from diffserve.api.bounds import check
from diffserve.api.embedding_types import MAX_INPUT_TOKENS, MAX_INPUTS, Embedded, EmbeddingRequest
from diffserve.api.errors import DiffserveError
from diffserve.api.types import MAX_PROMPT_CHARS, ModelInfo
from diffserve.service.admission import Backlog, Ticket
from diffserve.service.endpoint import Endpoint, RequestPlan
from diffserve.service.http.bodies import Ignored, WorkBody
from diffserve.service.http.streams import Events
from diffserve.service.lifecycle import json_response
from diffserve.service.models import find_model
from diffserve.service.texts.schemas import TokenId
from diffserve.service.threads import ANSWERS
from diffserve.settings.config import ServeConfig

MAX_DIMENSIONS: Final = 65_536

Input = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)]
Tokens = Annotated[list[TokenId], Field(max_length=MAX_INPUT_TOKENS, fail_fast=True)]
MODEL_HELP: Final = "An image model; omitted, or text-embedding-...: the first."
EmbeddingModel = Annotated[str, Field(max_length=256, description=MODEL_HELP)]
Dimensions = Annotated[
    int,
    Field(ge=1, le=MAX_DIMENSIONS, description="Number of leading dimensions to keep, normalized again; default: all."),
]


class EmbeddingBody(WorkBody):
    """Body of an embedding request; the response names the image model whose text encoder was used."""

    model_config = ConfigDict(title="CreateEmbeddingRequest")
    hints: ClassVar[Mapping[str, str]] = {"input": "give one or more texts"}

    input: (
        Input
        | Annotated[list[Input], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    )
    model: EmbeddingModel | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    user: Ignored | None = None


class EmbeddingPlan(RequestPlan, frozen=True, kw_only=True):
    """RequestPlan body: the engine's request and the format of the vectors."""

    request: EmbeddingRequest
    is_base64: bool
    dimensions: int | None


class EmbeddingEndpoint(Endpoint[EmbeddingBody, EmbeddingPlan]):
    """Endpoint of embeddings."""

    body = EmbeddingBody

    @property
    def _backlog(self) -> Backlog:
        return self._admission.embeddings

    async def _plan(self, body: EmbeddingBody, request: Request, client: str) -> EmbeddingPlan:
        info = find_model(body.model, self._engine.models, self._engine.text_info, kind="embedding")
        return plan_embedding(body, info, self._config, request.state.request_id)

    def _admit(self, plan: EmbeddingPlan, client: str) -> AbstractContextManager[Ticket]:
        request, num_inputs = plan.request, plan.request.num_inputs
        self._backlog.check_deadline(num_inputs, request.deadline_s, request.priority)
        return self._backlog.entered(client, num_inputs, priority=request.priority)

    async def _answer(self, plan: EmbeddingPlan, ticket: Ticket) -> Response:
        async with self._engine.submit(plan.request, ticket.watch, is_whole=True) as job:
            async for result in job:
                if isinstance(result, Embedded):
                    return json_response(await ANSWERS.run(answer_of, plan, result), plan.warnings)
        raise DiffserveError("the engine finished without vectors.")

    def _events(self, plan: EmbeddingPlan, ticket: Ticket) -> Events:
        raise NotImplementedError("embeddings are not streamed")  # embedding bodies never set is_stream


def plan_embedding(body: EmbeddingBody, info: ModelInfo, config: ServeConfig, request_id: str) -> EmbeddingPlan:
    """Convert ``body`` to an engine request. Raises InvalidRequest."""
    inputs = [body.input] if isinstance(body.input, str) else body.input
    texts = tuple(item for item in inputs if isinstance(item, str))
    ids = tuple(item for item in inputs if isinstance(item, int))
    lists = tuple(tuple(item) for item in inputs if isinstance(item, list))
    return EmbeddingPlan(
        request=EmbeddingRequest(
            texts=texts,
            token_ids=(ids,) if ids else lists,
            model=info.model_id,
            **body.urgency(config.request_timeout_s),
            request_id=f"emb-{request_id.rpartition('-')[2]}",
        ),
        is_base64=body.encoding_format == "base64",
        dimensions=body.dimensions,
        warnings=tuple(body.warnings),
    )


def answer_of(plan: EmbeddingPlan, result: Embedded) -> bytes:
    """Format the response; slow, so call it in a thread. Raises InvalidRequest if ``dimensions`` is too large."""
    vectors = np.frombuffer(result.data, dtype="<f4").reshape(-1, result.dimensions)
    if plan.dimensions is not None:
        vectors = cut(vectors, plan.dimensions)
    data = [
        {"object": "embedding", "index": index, "embedding": _encode_vector(vector, plan.is_base64)}
        for index, vector in enumerate(vectors)
    ]
    used = {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens}
    answer: dict[str, Any] = {"object": "list", "data": data, "model": result.model, "usage": used}
    return msgspec.json.encode(answer | {"warnings": list(plan.warnings)})


def cut(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """Truncate ``vectors`` (N, D) to ``dimensions`` and normalize them again. Raises InvalidRequest."""
    message = (
        f"dimensions is {dimensions}; the embeddings of this model have {vectors.shape[1]}, ask for at most that many."
    )
    check(dimensions <= vectors.shape[1], message, "dimensions")
    if dimensions == vectors.shape[1]:
        return vectors
    shorter = vectors[:, :dimensions]
    lengths = np.linalg.norm(shorter, axis=1, keepdims=True)
    return np.asarray(shorter / np.maximum(lengths, np.finfo(np.float32).tiny), dtype="<f4")


def _encode_vector(vector: NDArray[np.float32], is_base64: bool) -> Any:
    """Encode one vector; separate calls let other threads run in between."""
    return (
        base64.b64encode(vector.tobytes()).decode() if is_base64 else msgspec.Raw(msgspec.json.encode(vector.tolist()))
    )
