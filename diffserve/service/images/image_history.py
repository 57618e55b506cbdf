"""Image history: stored images and the parameters that reproduce them."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
from starlette.requests import Request

from diffserve.api.fields import FULL_INTERVAL, MAX_SEED
from diffserve.api.sizes import SizePlan
from diffserve.api.types import GenerationRequest, ImageResult
from diffserve.media.infotext import UPSCALE, parse_infotext
from diffserve.media.infotext_recipe import KEYS
from diffserve.service.http.errors import HttpError
from diffserve.service.images.image_store import ImageStore, StoredImage
from diffserve.service.stored.owners import Owners
from diffserve.store.errors import StoreError
from diffserve.store.files import SPARE_BYTES
from diffserve.store.history import Entry, History, new_entry_id

NOT_REPEATED: Final = frozenset({"num_steps", "strength", "loras", "controlnets", "references", "similarity_threshold"})
"""Fields of a recipe that a body names differently or cannot repeat."""

MAX_WAITING_BYTES: Final = 64 << 20
"""Bound on images that wait to be written to disk."""

PAUSE_S: Final = 0.02
"""Seconds that a single image waits before it is written, so that its answer is sent first."""

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("diffserve.http")


class ImageHistory:
    """Images of clients and the parameters that reproduce them.

    All calls run on one thread in order: an answer does not wait until its image is on disk, and a later lookup
    finds it.
    """

    def __init__(
        self, rows: History, pictures: ImageStore, owners: Owners, urls: ImageStore | None, *, is_kept: bool
    ) -> None:
        """Create the history.

        Args:
            rows: The entries, in the database.
            pictures: The image files of the entries.
            owners: Finds the owner of a request.
            urls: Images that also have URLs, under the same names; None: there are none.
            is_kept: Whether new images are recorded.
        """
        self.rows = rows
        self._pictures = pictures
        self._owners = owners
        self._urls = urls
        self._is_kept = is_kept
        self._thread = ThreadPoolExecutor(1, "history")
        self._waiting_bytes = self._num_waiting = 0
        self._wanted = threading.Event()
        self._lock = threading.Lock()

    async def do(self, work: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        """Run ``work`` on the history thread, after all earlier calls."""
        self._wanted.set()
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments, **keywords))

    def begin(self, add: Callable[[], None], num_bytes: int) -> None:
        """Queue ``add``, which must not raise; wait for it only if more than ``MAX_WAITING_BYTES`` are queued."""
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
        """Return the writer for the images of a request; None if they are not recorded."""
        owner = self._owners.owner(request) if self._is_kept else None
        return None if owner is None else HistoryWriter(self, owner)

    def add(
        self, entry_id: str, owner: str, file: bytes, name: str, words: str, model: str, recipe: dict[str, Any]
    ) -> None:
        """Store an image file and its entry.

        Raises:
            OSError: The file cannot be written; nothing is stored.
            StoreError: The entry cannot be written; nothing is stored.
        """
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
        """Open the image of ``entry``. Raises HttpError 404 if its file was removed."""
        try:
            return self._pictures.open(entry.file)
        except HttpError:
            message = "the image file was removed; its parameters are still stored."
            raise HttpError(404, message, code="picture_not_found") from None

    def forget(self, files: list[str]) -> None:
        """Remove images, their entries and their URLs permanently."""
        for name in files:
            self._pictures.remove(name)
            if self._urls is not None:
                self._urls.remove(name)
        self.rows.forget(files, for_good=True)


class HistoryWriter:
    """Records the images of one request."""

    def __init__(self, history: ImageHistory, owner: str) -> None:
        self._history = history
        self._owner = owner

    def add(self, request: GenerationRequest, size: SizePlan, result: ImageResult, file: bytes, name: str) -> str:
        """Record an image and return its id; a failure is logged. Call it in a thread.

        Args:
            request: The request of the image.
            size: The delivered size, and the requested one.
            result: The result of the engine.
            file: The encoded image.
            name: The file name.
        """
        words = " ".join(filter(None, (result.original_prompt, result.prompt)))
        return self._begin(file, name, words, result.model, recipe_of(request, size, result, name.rpartition(".")[2]))

    def add_upscaled(self, recipe: dict[str, Any], upscaler: str, file: bytes, name: str) -> str:
        """Record an upscaled image and return its id; a failure is logged. Call it in a thread.

        Args:
            recipe: Its parameters, from ``upscaled_recipe``.
            upscaler: Name of the upscaler, which takes the place of the model.
            file: The encoded image.
            name: The file name.
        """
        return self._begin(file, name, recipe["prompt"], upscaler, recipe)

    def _begin(self, file: bytes, name: str, words: str, model: str, recipe: dict[str, Any]) -> str:
        """Begin to store an image and return the id of its entry."""
        entry_id = new_entry_id()

        def add() -> None:
            try:
                self._history.add(entry_id, self._owner, file, name, words, model, recipe)
            except (OSError, StoreError) as error:
                log.error("an image could not be recorded in the history", extra={"reason": str(error)})

        self._history.begin(add, len(file))
        return entry_id


def recipe_of(request: GenerationRequest, size: SizePlan, result: ImageResult, image_format: str) -> dict[str, Any]:
    """Return the parameters of ``result`` and how to repeat it.

    ``restore`` has a ``body`` for ``url``, to which the inputs in ``needs`` must be added.
    """
    needs = [] if request.init_image is None else ["image"]
    needs += [] if request.mask_image is None else ["mask"]
    needs += ["controlnets"] if result.controlnets else []
    needs += ["references"] if result.references else []
    recipe = msgspec.to_builtins(result.recipe())
    fields = {name: value for name, value in recipe.items() if value is not None and name not in NOT_REPEATED}
    if result.guidance_interval == FULL_INTERVAL:
        fields.pop("guidance_interval")
    if result.micro_conditioning is not None:
        sizes = fields["micro_conditioning"]
        fields["micro_conditioning"] = {name: value for name, value in sizes.items() if value is not None}
    body = {
        "model": result.model,
        "prompt": result.prompt,
        "negative_prompt": result.negative_prompt,
        "prompt_rewriter": "off",
        "size": "{}x{}".format(*size.recorded_px),
        "seed": result.seed,
        "num_inference_steps": result.num_steps,
        "output_format": image_format,
        **fields,
        **({"loras": msgspec.to_builtins(result.loras)} if result.loras else {}),
        **({} if result.strength is None else {"strength": result.strength}),
    }
    return {
        "prompt": result.prompt,
        "original_prompt": result.original_prompt,
        "width": size.width_px,
        "height": size.height_px,
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


def upscaled_recipe(infotext: str, request_id: str, body: dict[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    """Return the parameters of an upscaled image and how to repeat the upscaling.

    Args:
        infotext: The parameters of the image; without a prompt and a seed if it has none.
        request_id: Id of the request.
        body: Upscaler, size and format of the request that repeats it.
        size: Width and height in pixels.
    """
    read = parse_infotext(infotext)
    prompt = read.prompt if read.fields else infotext.rpartition(f"{UPSCALE}: ")[0].strip()
    numbers = {name: _seed_in(read.fields.get(KEYS[name], "")) for name in ("seed", "variation_seed")}
    return {
        "prompt": prompt,
        "original_prompt": None,
        "width": size[0],
        "height": size[1],
        **numbers,
        "model_digest": read.fields.get("Model hash", ""),
        "num_evaluations": 0,
        "request_id": request_id,
        "restore": {"url": "/v1/images/upscale", "body": body, "needs": ["image"]},
    }


def _seed_in(text: str) -> int | None:
    """Return the seed in a value of infotext; None if it is none."""
    is_seed = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_SEED))
    return int(text) if is_seed and int(text) <= MAX_SEED else None
