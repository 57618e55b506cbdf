"""The page's client of its server, and its error messages."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from diffserve.api.errors import DiffserveError, InvalidRequest, QueueFull
from diffserve.client import Capabilities, LanguageCapabilities, Model, ServerUnreachable
from tests.service import talker
from tests.service.server import RunningServer
from tests.ui.capabilities import MODEL
from ui.server import Server, models_of, sentence

WRITER = LanguageCapabilities(
    architecture="Llama", digest="0", device="cpu", dtype="float32", context_tokens=512, styles=("prose",)
)
DEAF = LanguageCapabilities(
    architecture="Llama", digest="0", device="cpu", dtype="float32", context_tokens=512, styles=(), can_rewrite=False
)


def model(name: str, **capabilities: object) -> Model:
    return Model(id=name, created=1, capabilities=Capabilities(**capabilities) if capabilities else None)  # type: ignore[arg-type]


def test_the_loaded_models_are_found_among_the_aliases() -> None:
    other = msgspec.structs.replace(MODEL, default_num_steps=4)
    several = models_of([model("painter", image=MODEL), model("other", image=other), model("broken")])
    assert (several.names, several.image_of("other"), several.image_of("gone")) == (["painter", "other"], other, MODEL)
    models = models_of([model("dall-e-3"), model("painter", image=MODEL), model("writer", language=WRITER)])
    assert (models.image_id, models.image, models.language_id, models.language) == ("painter", MODEL, "writer", WRITER)


def test_a_language_model_that_cannot_rewrite_is_not_offered() -> None:
    models = models_of([model("painter", image=MODEL), model("writer", language=DEAF)])
    assert (models.language_id, models.language) == (None, None)


def test_an_older_server_causes_a_request_to_update_it() -> None:
    with pytest.raises(DiffserveError, match="update it"):
        models_of([model("painter"), model("dall-e-3")])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InvalidRequest("size is 9x9; give\nmore"), "Size is 9x9; give more."),
        (QueueFull("the queue is full.", retry_after_s=3.6), "The queue is full. Try again in 4 s."),
        (OSError(28, "No space left on device"), "free some disk space"),
        (ValueError("internals"), "internal error; see its log"),
    ],
)
def test_an_error_is_a_message_with_the_fix(error: Exception, message: str) -> None:
    assert message in sentence(error)
    assert "internals" not in sentence(error)


@pytest.mark.slow
def test_a_real_server_is_queried_once(text_server: RunningServer) -> None:
    async def story() -> None:
        server = Server(text_server.url)
        assert await server.client.is_ready()
        models = await server.wait_for_models()
        assert models.language_id == talker.NAME
        assert await server.models() is models
        await server.close()

    asyncio.run(story())


def test_without_an_answer_the_address_is_reported() -> None:
    async def story() -> None:
        server = Server("http://127.0.0.1:9")
        with pytest.raises(ServerUnreachable, match=r"http://127\.0\.0\.1:9;") as caught:
            await server.models()
        assert "diffserve serve" in sentence(caught.value)
        await server.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("The eta is '2'; give a number.", "“Eta” is '2'; give a number."),
        ("switch_at is 0.5; the model has no refiner.", "“Refiner switch” is 0.5; the model has no refiner."),
        ("micro_conditioning.crop is (1,); give two", "“Size conditioning”.crop is (1,); give two."),
        ("the metadata is lost", "The metadata is lost."),
    ],
)
def test_errors_use_the_field_labels_of_the_page(message: str, expected: str) -> None:
    assert sentence(InvalidRequest(message)) == expected
