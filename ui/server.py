"""The server as the page knows it: its address, what it can do, and what to say when it fails."""

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
"""Before a full server is asked again."""

GRACE_S: Final = 30.0
"""For so long a painting goes on that nobody watches: a page that is reloaded takes seconds to come back,
and many on a busy machine."""


class Models(NamedTuple):
    """What can be asked for. ``image`` paints unless another is chosen, which ``others`` are, by their names;
    ``language`` is ``None`` where nothing rewrites wishes.
    """

    image_id: str
    image: ImageCapabilities
    language_id: str | None = None
    language: LanguageCapabilities | None = None
    others: Mapping[str, ImageCapabilities] = MappingProxyType({})

    @property
    def names(self) -> list[str]:
        """Of the image models."""
        return [self.image_id, *self.others]

    def image_of(self, name: str | None) -> ImageCapabilities:
        """What the image model ``name`` can do; the first one where there is none of that name."""
        return self.others.get(name, self.image) if isinstance(name, str) else self.image


class Server:
    """A diffserve server at ``url``, the ``files`` of this process in which visitors' pictures are kept, and for how
    long what was asked for goes on while nobody watches: ``grace_s``.
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
        """The one client of this process: use it within a coroutine, and leave it open."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client, self._loop = AsyncClient(self.url, api_key=self._api_key), loop
        return self._client

    async def models(self, *, is_fresh: bool = False) -> Models:
        """What is loaded: asked once and remembered, or asked again where ``is_fresh``.

        Raises ServerUnreachable, EngineUnavailable while it loads, and whatever else a client raises.
        """
        if self._models is None or is_fresh:
            self._models = models_of(await self.client.models())
        return self._models

    async def close(self) -> None:
        """Hang up, and remove the files."""
        if self._client is not None:
            await self._client.close()
        await asyncio.to_thread(self.files.remove)

    async def wait_for_models(self, patience_s: float = PATIENCE_S) -> Models:
        """The same once they are loaded; EngineUnavailable after ``patience_s``."""
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
    """The image models and, where there is one that rewrites, the language model. DiffserveError for an old server."""
    images: dict[str, ImageCapabilities] = {}
    language: tuple[str, LanguageCapabilities] | None = None
    for model in models:
        if model.capabilities is not None and model.capabilities.image is not None:
            images[model.id] = model.capabilities.image
        if model.capabilities is not None and model.capabilities.language is not None:
            language = language or (model.id, model.capabilities.language)
    if not images:
        raise DiffserveError("the server does not say what its models can do; update it to the version of this page.")
    first, *others = images
    image = Models(first, images[first], others={name: images[name] for name in others})
    if language is None or not language[1].can_rewrite:
        return image
    return image._replace(language_id=language[0], language=language[1])


def sentence(error: BaseException) -> str:
    """What went wrong and the way out, for a person at the page."""
    match error:
        case QueueFull():
            return f"{whole(as_labelled(error.message))} Try again in {max(1, round(error.retry_after_s))} s."
        case DiffserveError():
            return whole(as_labelled(error.message))
        case OSError():
            return f"The page could not write a file: {error.strerror or error}; make room on its disk and try again."
        case _:
            return "Something went wrong inside the page; its log says more. Try again, or reload the page."


def whole(text: str) -> str:
    """``text`` on one line, with a capital letter and a full stop."""
    text = " ".join(text.split())
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."
