"""What a server remembers of the pictures that it painted: each as a file, with the recipe that paints it again."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
from starlette.requests import Request

from diffserve.api.types import FULL_INTERVAL, GenerationRequest, ImageResult
from diffserve.service.http.errors import HttpError
from diffserve.service.images.image_store import ImageStore, StoredImage
from diffserve.service.stored.owners import Owners
from diffserve.store.files import SPARE_BYTES
from diffserve.store.history import Entry, History, new_entry_id

NOT_REPEATED: Final = frozenset({"num_steps", "strength", "loras", "controlnets", "similarity_threshold"})
"""Of a recipe: said otherwise, or not to be had again."""

MAX_WAITING_BYTES: Final = 64 << 20
"""Of pictures that are not on the disk yet."""

PAUSE_S: Final = 0.02
"""So long a picture that is alone waits before it is written, lest it be in the way of the answer that brings it."""

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("diffserve.http")


class ImageHistory:
    """``rows`` and the ``pictures`` that they name. ``urls``: those that are also at a URL, by the same names.

    All that is done with it is done in one thread, in the order in which it is asked for: an answer does not wait until
    its picture is on the disk, and whoever looks for it then finds it.
    """

    def __init__(
        self, rows: History, pictures: ImageStore, owners: Owners, urls: ImageStore | None, *, is_kept: bool
    ) -> None:
        self.rows = rows
        self._pictures = pictures
        self._owners = owners
        self._urls = urls
        self._is_kept = is_kept
        self._thread = ThreadPoolExecutor(1, "history")
        self._waiting_bytes = self._num_waiting = 0
        self._wanted = threading.Event()
        self._lock = threading.Lock()

    async def do(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """``work`` of this history, when what was asked for before is done."""
        self._wanted.set()
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments, **named))

    def begin(self, add: Callable[[], None], num_bytes: int) -> None:
        """Have ``add``, which raises nothing, done; wait for it only where a lot is waiting already."""
        with self._lock:
            self._waiting_bytes += num_bytes
            self._num_waiting += 1
            is_much = self._waiting_bytes > MAX_WAITING_BYTES

        def work() -> None:
            self._wanted.wait(PAUSE_S if self._num_waiting == 1 else 0.0)
            self._wanted.clear()
            add()
            with self._lock:
                self._waiting_bytes -= num_bytes
                self._num_waiting -= 1

        done = self._thread.submit(work)
        if is_much:
            done.result()

    def writer(self, request: Request) -> HistoryWriter | None:
        """Where the pictures of ``request`` go; ``None`` where none is kept."""
        owner = self._owners.known(request) if self._is_kept else None
        return None if owner is None else HistoryWriter(self, owner)

    def add(
        self, entry_id: str, owner: str, file: bytes, name: str, words: str, model: str, recipe: dict[str, Any]
    ) -> None:
        """Keep ``file``. OSError or sqlite3.Error where it cannot be; then nothing is."""
        folder = self._pictures.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free - len(file) < SPARE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._pictures.store(file, name)
        try:
            self.rows.add(entry_id, owner, name, words, model, recipe)
        except BaseException:
            self._pictures.remove(name)
            raise

    def open(self, entry: Entry) -> StoredImage:
        """The picture of ``entry``; HttpError 404 where it is gone."""
        try:
            return self._pictures.open(entry.file)
        except HttpError:
            said = "the picture itself is gone; how it was painted is still known."
            raise HttpError(404, said, code="picture_not_found") from None

    def forget(self, files: list[str]) -> None:
        """Remove pictures and what is known of them, wherever it is kept, for good."""
        for name in files:
            self._pictures.remove(name)
            if self._urls is not None:
                self._urls.remove(name)
        self.rows.forget(files, for_good=True)


class HistoryWriter:
    """The history as one request writes it."""

    def __init__(self, history: ImageHistory, owner: str) -> None:
        self._history = history
        self._owner = owner

    def add(self, asked: GenerationRequest, size: tuple[int, int], result: ImageResult, file: bytes, name: str) -> str:
        """The id under which ``file`` of ``size``, painted because of ``asked``, is remembered; where it cannot
        be, the log has a line. Call it in a thread.
        """
        words = " ".join(filter(None, (result.original_prompt, result.prompt)))
        told = recipe_of(asked, size, result, name.rpartition(".")[2])
        entry_id = new_entry_id()

        def add() -> None:
            try:
                self._history.add(entry_id, self._owner, file, name, words, result.model, told)
            except (OSError, sqlite3.Error) as error:
                log.error("a picture is not remembered", extra={"reason": type(error).__name__})

        self._history.begin(add, len(file))
        return entry_id


def recipe_of(
    painted: GenerationRequest, size: tuple[int, int], result: ImageResult, image_format: str
) -> dict[str, Any]:
    """What is told of ``result``, and how to ask for it again: ``request`` is a body for ``url``, to which what
    it ``needs`` is to be added.
    """
    needs = [] if painted.init_image is None else ["image"]
    needs += [] if painted.mask_image is None else ["mask"]
    needs += ["controlnets"] if result.controlnets else []
    recipe = msgspec.to_builtins(result.recipe())
    asked = {name: value for name, value in recipe.items() if value is not None and name not in NOT_REPEATED}
    if result.guidance_interval == FULL_INTERVAL:
        asked.pop("guidance_interval")
    if result.micro_conditioning is not None:
        sizes = asked["micro_conditioning"]
        asked["micro_conditioning"] = {name: value for name, value in sizes.items() if value is not None}
    body = {
        "model": result.model,
        "prompt": result.prompt,
        "negative_prompt": result.negative_prompt,
        "prompt_rewriter": "off",
        "size": f"{size[0]}x{size[1]}",
        "seed": result.seed,
        "num_inference_steps": result.num_steps,
        "output_format": image_format,
        **asked,
        **({"loras": msgspec.to_builtins(result.loras)} if result.loras else {}),
        **({} if result.strength is None else {"strength": result.strength}),
    }
    return {
        "prompt": result.prompt,
        "original_prompt": result.original_prompt,
        "width": size[0],
        "height": size[1],
        "seed": result.seed,
        "variation_seed": result.variation_seed,
        "model_digest": result.model_digest,
        "num_evaluations": result.num_evaluations,
        "request_id": result.request_id,
        "restore": {
            "url": "/v1/images/edits" if "image" in needs else "/v1/images/generations",
            "body": body,
            "needs": needs,
        },
    }
