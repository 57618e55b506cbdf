"""Text embeddings: pooled encoder output, the same bytes in any batch, without delaying other requests."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from diffserve.api.embedding_types import Embedded, EmbeddingRequest
from diffserve.api.errors import InvalidRequest, ModelNotFound
from diffserve.api.ipc import AnyRequest
from diffserve.api.types import Cancelled, Failed, ImageFinished
from diffserve.engine.combined_engine import CombinedEngine
from diffserve.engine.image.engine import Engine
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.text.conditioning import PagedConditioner
from diffserve.settings.config import EngineConfig
from tests.device import DEVICE, tolerance
from tests.engine.combined.conftest import MakeStudio
from tests.engine.combined.test_combined_engine import of, picture, text
from tests.engine.combined.test_models import MakeStudio as MakeModels
from tests.engine.combined.test_models import make_models as make_models

TEXTS = ("a red fox", "a red fox in the snow", "the (dog:1.3) [cat]", "a", "fox " * 40 + "dog", "a red fox")


def embedded(studio: CombinedEngine, *texts: str, model: str = "") -> NDArray[np.float32]:
    """Return the vectors of ``texts``, computed by one request."""
    request = EmbeddingRequest(texts=texts, model=model)
    studio.submit(request)
    (event,) = of(list(studio.events()), Embedded, request.request_id)
    return vectors_of(event)


def vectors_of(event: Embedded) -> NDArray[np.float32]:
    return np.frombuffer(event.data, dtype="<f4").reshape(-1, event.dimensions)


def pooled(model: DiffusionModel, text: str) -> NDArray[np.float32]:
    """Pool a text as transformers does: average the windows, weighted by their number of tokens."""
    encoder = model.text.encoders[-1]
    ids = encoder.tokenizer(text, add_special_tokens=False).input_ids
    room, total = encoder.window_tokens - 2, torch.zeros((), device=DEVICE)
    for start in range(0, len(ids), room):
        body = ids[start : start + room]
        padding = [encoder.special.pad] * (room - len(body))
        window = torch.tensor([[encoder.special.start, *body, encoder.special.end, *padding]], device=DEVICE)
        with torch.inference_mode():
            output = encoder.network(window)
        vector = output.text_embeds if hasattr(output, "text_embeds") else output.pooler_output
        total = total + len(body) * torch.nn.functional.normalize(vector[0], dim=0)
    return np.asarray(torch.nn.functional.normalize(total, dim=0).cpu().numpy())


@pytest.mark.parametrize(("kind", "way"), [("sd15", "paged"), ("sd15", "plain"), ("sdxl", "paged")])
def test_a_vector_is_what_the_encoder_pools(tiny_model: Callable[[str], Path], kind: str, way: str) -> None:
    model = load_model(tiny_model(kind), dtype="float32", device=DEVICE)
    studio = CombinedEngine(Engine(model, EngineConfig(cross_attention=way)))  # type: ignore[arg-type]
    words = ("a red fox", "the (dog:1.3) [cat]", "fox " * 120)
    vectors = embedded(studio, *words)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    np.testing.assert_allclose(vectors, [pooled(model, word) for word in words], atol=tolerance(2e-6))


@pytest.mark.slow
def test_a_vector_depends_on_no_neighbour(make_studio: MakeStudio) -> None:
    alone = {words: embedded(make_studio(has_texts=False), words)[0].tobytes() for words in TEXTS}
    studio = make_studio()
    while studio.study():
        pass
    conditioner = studio.engine.runners.conditioner
    assert isinstance(conditioner, PagedConditioner)
    assert max(conditioner.batches.sizes) > 1, "windows share calls"
    for texts in (TEXTS, TEXTS[::-1], TEXTS[:2], TEXTS * 7):
        assert [vector.tobytes() for vector in embedded(studio, *texts)] == [alone[words] for words in texts]
    pictures = [picture(prompt, num_steps=4) for prompt in TEXTS[:3]]
    requests = [EmbeddingRequest(texts=TEXTS[index:]) for index in range(4)]
    together: list[AnyRequest] = [*pictures, text(), *requests]
    for embedding_request in together:
        studio.submit(embedding_request)
    events = list(studio.events())
    for index, request in enumerate(requests):
        (event,) = of(events, Embedded, request.request_id)
        assert [vector.tobytes() for vector in vectors_of(event)] == [alone[words] for words in TEXTS[index:]]
    for image_request in pictures:
        studio.submit(again := picture(image_request.prompt, num_steps=4))
        (painted,) = of(list(studio.events()), ImageFinished, again.request_id)
        assert painted.result.picture == of(events, ImageFinished, image_request.request_id)[0].result.picture


def test_token_ids_are_as_good_as_their_text(make_studio: MakeStudio) -> None:
    studio = make_studio(has_texts=False)
    encoder = studio.engine.model.text.encoders[-1]
    ids = tuple(encoder.tokenizer("a red fox", add_special_tokens=False).input_ids)
    studio.submit(EmbeddingRequest(token_ids=(ids, ids[:1])))
    (event,) = of(list(studio.events()), Embedded)
    assert event.num_tokens == len(ids) + 1
    assert vectors_of(event)[0].tobytes() == embedded(studio, "a red fox")[0].tobytes()


def test_what_cannot_be_read_fails_alone_and_is_named(make_studio: MakeStudio) -> None:
    clock = count()
    studio = make_studio(has_texts=False, clock=lambda: float(next(clock)))
    good, unknown = EmbeddingRequest(texts=TEXTS), EmbeddingRequest(token_ids=((1, 2), (10**9,)))
    endless, late = EmbeddingRequest(texts=("a", "the dog, " * 3000)), EmbeddingRequest(texts=TEXTS, deadline_s=1.0)
    unwanted = EmbeddingRequest(texts=TEXTS)
    for request in (unknown, good, endless, late, unwanted):
        studio.submit(request)
    assert studio.cancel(unwanted.request_id)
    events = list(studio.events())
    failed = {event.request_id: (event.code, event.param, event.message) for event in of(events, Failed)}
    assert failed.keys() == {unknown.request_id, endless.request_id, late.request_id}
    assert failed[unknown.request_id][:2] == ("invalid_value", "input")
    assert "input[1]: token id 1000000000" in failed[unknown.request_id][2]
    assert failed[endless.request_id][:2] == ("string_above_max_length", "input")
    assert failed[late.request_id][0] == "deadline_exceeded"
    assert of(events, Cancelled)[0].request_id == unwanted.request_id
    assert [event.request_id for event in of(events, Embedded)] == [good.request_id]
    bad: tuple[dict[str, Any], ...] = (
        {},
        {"texts": ("a", "")},
        {"token_ids": ((),)},
        {"texts": ("a",), "token_ids": ((1,),)},
    )
    for wrong in bad:
        with pytest.raises(InvalidRequest, match="empty"):
            EmbeddingRequest(**wrong)


def test_a_small_request_does_not_wait_for_a_large_one_nor_a_picture_for_either(make_studio: MakeStudio) -> None:
    studio = make_studio(has_texts=False)
    large, small = EmbeddingRequest(texts=tuple(f"fox {n}" for n in range(100))), EmbeddingRequest(texts=("a dog",))
    background_requests = [EmbeddingRequest(texts=("a cat", "a fox")) for _ in range(20)]
    together: list[AnyRequest] = [large, *background_requests, picture(num_steps=2), small]
    for request in together:
        studio.submit(request)
    ends = [event.request_id for event in studio.events() if isinstance(event, (Embedded, ImageFinished))]
    assert ends[-1] == large.request_id
    assert len(ends) == 23


def test_interactive_texts_come_before_batch_work_which_does_not_starve(make_studio: MakeStudio) -> None:
    studio = make_studio(has_texts=False)
    words = tuple(f"fox {n}" for n in range(100))
    batch = [EmbeddingRequest(texts=words[n:], priority="batch") for n in (0, 99)]
    interactive = EmbeddingRequest(texts=words * 4)
    for request in (*batch, interactive):
        studio.submit(request)
    ends = [event.request_id for event in studio.events() if isinstance(event, Embedded)]
    assert ends == [batch[1].request_id, interactive.request_id, batch[0].request_id]
    with pytest.raises(InvalidRequest, match="priority"):
        EmbeddingRequest(texts=("a",), priority="later")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_model_that_is_not_loaded_is_loaded_for_it(
    make_models: MakeModels, tiny_model: Callable[[str], Path]
) -> None:
    studio = make_models("sd15", other=tiny_model("sd2"))
    assert len(studio.images.loaded) == 1
    vectors = embedded(studio, *TEXTS, model="other")
    assert len(studio.images.loaded) == 2
    assert embedded(studio, *TEXTS[:2], model="other").tobytes() == vectors[:2].tobytes()
    assert embedded(studio, *TEXTS[:2]).shape[0] == 2
    with pytest.raises(ModelNotFound, match="nobody"):
        studio.submit(EmbeddingRequest(texts=TEXTS, model="nobody"))
    assert not studio.has_work
