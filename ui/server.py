"""The server as the page sees it: address, models, and error messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from diffserve.api.errors import DiffserveError, EngineUnavailable, QueueFull
from diffserve.client import AsyncClient, ImageCapabilities, LanguageCapabilities, Model
from ui.fields import as_labelled
from ui.files import PageFiles

LOOK_AGAIN_S: Final = 1.0
PATIENCE_S: Final = 300.0
LONGEST_WAIT_S: Final = 5.0
"""Longest pause before a request to a full server is retried."""

GRACE_S: Final = 30.0
"""How long a request continues while no page shows it; reloading takes many seconds on a busy machine."""


class Models(NamedTuple):
    """Models of the server.

    Attributes:
        image_id: The name of the default image model.
        image: The capabilities of the default image model.
        language_id: The name of the language model that rewrites prompts, if there is one.
        language: The capabilities of that language model.
        other_models: The capabilities of the other image models, by name.
    """

    image_id: str
    image: ImageCapabilities
    language_id: str | None = None
    language: LanguageCapabilities | None = None
    other_models: Mapping[str, ImageCapabilities] = MappingProxyType({})

    @property
    def names(self) -> list[str]:
        """The names of all image models."""
        return [self.image_id, *self.other_models]

    def image_of(self, name: str | None) -> ImageCapabilities:
        """Return the capabilities of the image model ``name``, or of the default one if there is none of that name."""
        return self.other_models.get(name, self.image) if isinstance(name, str) else self.image


class Server:
    """Connection to a diffserve server.

    Attributes:
        url: The address of the server.
        files: The image files of the page's visitors.
        grace_s: How many seconds a request continues while no page shows it.
    """

    def __init__(
        self, url: str, *, files: PageFiles | None = None, grace_s: float = GRACE_S, api_key: str | None = None
    ) -> None:
        self._api_key = api_key
        self.url = url.rstrip("/")
        self.grace_s = grace_s
        self.files = files or PageFiles()
        self._client: AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._models: Models | None = None

    @property
    def client(self) -> AsyncClient:
        """The shared client of this process. Use it inside a coroutine, and do not close it."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client, self._loop = AsyncClient(self.url, api_key=self._api_key), loop
        return self._client

    async def models(self, *, is_fresh: bool = False) -> Models:
        """Return the models of the server; they are cached unless ``is_fresh``.

        Raises:
            ServerUnreachable: No server answers.
            EngineUnavailable: The server is loading its models.
            DiffserveError: Another error of the client.
        """
        if self._models is None or is_fresh:
            self._models = models_of(await self.client.models())
        return self._models

    async def close(self) -> None:
        """Close the connections and remove the files."""
        if self._client is not None:
            await self._client.close()
        await asyncio.to_thread(self.files.remove)

    async def wait_for_models(self, patience_s: float = PATIENCE_S) -> Models:
        """Return the models of the server once they are loaded.

        Raises:
            EngineUnavailable: They are not loaded after ``patience_s`` seconds.
        """
        clock = asyncio.get_running_loop().time
        until_s = clock() + patience_s
        while True:
            try:
                return await self.models(is_fresh=True)
            except EngineUnavailable:
                if clock() > until_s:
                    raise
            await asyncio.sleep(LOOK_AGAIN_S)


def models_of(models: Sequence[Model]) -> Models:
    """Split ``models`` into image models and the language model that rewrites prompts.

    Raises:
        DiffserveError: No image model has capabilities, because the server is too old.
    """
    images: dict[str, ImageCapabilities] = {}
    language: tuple[str, LanguageCapabilities] | None = None
    for model in models:
        if model.capabilities is not None and model.capabilities.image is not None:
            images[model.id] = model.capabilities.image
        if model.capabilities is not None and model.capabilities.language is not None:
            language = language or (model.id, model.capabilities.language)
    if not images:
        raise DiffserveError(
            "the server does not report the capabilities of its models; update it to the version of this page."
        )
    first_id, *other_ids = images
    image = Models(first_id, images[first_id], other_models={name: images[name] for name in other_ids})
    if language is None or not language[1].can_rewrite:
        return image
    return image._replace(language_id=language[0], language=language[1])


def sentence(error: BaseException) -> str:
    """Return the message of ``error`` for the user, with a way to solve it."""
    match error:
        case QueueFull():
            return f"{as_sentence(as_labelled(error.message))} Try again in {max(1, round(error.retry_after_s))} s."
        case DiffserveError():
            return as_sentence(as_labelled(error.message))
        case OSError():
            return f"The page could not write a file: {error.strerror or error}; free some disk space and try again."
        case _:
            return "The page had an internal error; see its log for details. Try again, or reload the page."


def as_sentence(text: str) -> str:
    """Return ``text`` as a sentence on one line, with a capital letter and a full stop."""
    text = " ".join(text.split())
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."
