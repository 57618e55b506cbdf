"""RewriteQueue: image requests whose prompt is being rewritten. If that fails, the original prompt is used.

::

    submit --> rewriter --> ready --> engine          a failing, a busy or a missing rewriter: straight to ready,
                                                      with the original prompt and a warning
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from diffserve.api.errors import DeadlineExceeded, DiffserveError, InvalidRequest, QueueFull
from diffserve.api.ipc import AnyEvent
from diffserve.api.rewrite_types import RewriteEvent, RewriteFinished, RewriteRequest
from diffserve.api.stage_types import TextsEncoded
from diffserve.api.types import TERMINAL, Accepted, Cancelled, Event, Failed, GenerationRequest, ImageFinished
from diffserve.engine.base_engine import failure_of
from diffserve.engine.image.engines import ImageEngines
from diffserve.engine.stages import EncodingStage

if TYPE_CHECKING:
    from diffserve.engine.rewriter import Rewriter

REWRITING_PART: Final = 0.5
"""Of a request's deadline, so much may go into rewriting."""

NO_MODEL: Final = "no language model is loaded, so the prompt was used as it is."
FAILED: Final = "the prompt could not be rewritten, so it was used as it is."
BUSY: Final = "the rewriter is busy, so the prompt was used as it is."


class Note(NamedTuple):
    """Additions to the events of a rewritten request.

    Attributes:
        rewriting_s: Device seconds of the rewriting, which are charged to the first image.
    """

    waited_s: float
    warnings: tuple[str, ...]
    original_prompt: str | None
    rewriting_s: float = 0.0


@dataclass(eq=False)
class PendingImage:
    """A request that is not with the engine yet; ``prompt`` and ``warnings`` are known when it is ready."""

    request: GenerationRequest
    submitted_s: float
    rewrite_id: str = ""
    prompt: str = ""
    warnings: tuple[str, ...] = ()
    rewriting_s: float = 0.0


class RewriteQueue:
    """Thread-safe queue before ``engine`` for models of ``images``; ``rewriter`` is None without a language model."""

    def __init__(
        self,
        engine: ImageEngines | EncodingStage,
        images: ImageEngines,
        rewriter: Rewriter | None,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._images = images
        self._rewriter = rewriter
        self._clock = clock
        self._lock = threading.RLock()
        self._rewriting: dict[str, PendingImage] = {}  # by the id of the rewrite
        self._ready: deque[PendingImage] = deque()
        self._notes: dict[str, Note] = {}

    def __len__(self) -> int:
        return len(self._rewriting) + len(self._ready)

    @property
    def has_ready(self) -> bool:
        """Return whether ``release`` has a request to submit."""
        return bool(self._ready)

    def holds(self, request_id: str) -> bool:
        """Return whether a request is here and not yet with the engine."""
        with self._lock:
            return self._find(request_id) is not None

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request for rewriting; ``release`` passes it to the engine.

        Raises the errors of the engine at once, and InvalidRequest for an unknown style.
        """
        with self._lock:
            self._engine.check(request, num_ahead=len(self))
            image = PendingImage(request, self._clock())
            warning = self._start_rewrite(image)
            if warning is not None:
                self._make_ready(image, request.prompt, warning)

    def handle(self, event: RewriteEvent) -> bool:
        """Process an event of a rewrite requested here; return False for other events."""
        with self._lock:
            image = self._rewriting.get(event.request_id)
            if image is None:
                return False
            match event:
                case RewriteFinished(rewrites=(first, *_)):
                    image.rewriting_s = event.usage.device_s
                    self._make_ready(image, first.prompt, first.warning)
                case RewriteFinished() | Failed() | Cancelled():
                    self._make_ready(image, image.request.prompt, FAILED)
                case _:
                    pass
            return True

    def give_up_rewriting(self) -> None:
        """Release all images that wait for the rewriter, with their original prompts."""
        with self._lock:
            for image in list(self._rewriting.values()):
                self._make_ready(image, image.request.prompt, FAILED)

    def release(self) -> list[Event]:
        """Submit ready requests while the engine accepts them; return the events of refused ones."""
        refused: list[Event] = []
        with self._lock:
            while self._ready:
                try:
                    self._hand_over(self._ready[0])
                except QueueFull:
                    break
                except Exception as error:
                    failure = failure_of(error, "taking this request")
                    refused.append(failure.of(self._ready[0].request.request_id))
                self._ready.popleft()
        return refused

    def cancel(self, request_id: str) -> bool:
        """Remove a request that is not yet with the engine; return False if there is none."""
        with self._lock:
            image = self._find(request_id)
            if image is None:
                return False
            if image.rewrite_id in self._rewriting:
                del self._rewriting[image.rewrite_id]
                assert self._rewriter is not None
                self._rewriter.cancel(image.rewrite_id)
            else:
                self._ready.remove(image)
            return True

    def with_rewrite(self, event: AnyEvent) -> AnyEvent:
        """Add the results of the rewrite to an event of the engine."""
        with self._lock:
            note = self._notes.get(event.request_id)
            if note is None:
                return event
            if isinstance(event, (*TERMINAL, TextsEncoded)):
                del self._notes[event.request_id]
            elif isinstance(event, ImageFinished):
                self._notes[event.request_id] = note._replace(rewriting_s=0.0)
        match event:
            case Accepted():
                return msgspec.structs.replace(event, warnings=(*note.warnings, *event.warnings))
            case ImageFinished(result=result):
                timings = msgspec.structs.replace(result.timings, queue_s=result.timings.queue_s + note.waited_s)
                updated = msgspec.structs.replace(
                    result,
                    timings=timings,
                    device_s=result.device_s + note.rewriting_s,
                    warnings=(*note.warnings, *result.warnings),
                    original_prompt=note.original_prompt,
                )
                return msgspec.structs.replace(event, result=updated)
            case TextsEncoded():
                return msgspec.structs.replace(
                    event,
                    warnings=note.warnings,
                    original_prompt=note.original_prompt,
                    rewriting_s=note.rewriting_s,
                    waited_s=event.waited_s + note.waited_s,
                )
            case _:
                return event

    def check_integrity(self) -> None:
        """Raise AssertionError if an image is in two places, or waits for a rewrite that is not live."""
        with self._lock:
            names = [image.request.request_id for image in (*self._rewriting.values(), *self._ready)]
            assert len(set(names)) == len(names), "an image is in two places"
            num_live = 0 if self._rewriter is None else self._rewriter.num_live
            assert num_live >= len(self._rewriting), "an image waits for a rewrite that is not live"

    # Below the counter --------------------------------------------------------------------------------------------

    def _start_rewrite(self, image: PendingImage) -> str | None:
        """Start the rewrite, or return a warning; raise InvalidRequest for an unknown style."""
        request = image.request
        if self._rewriter is None or request.rewriting is None:
            return NO_MODEL
        deadline_s = None if request.deadline_s is None else REWRITING_PART * request.deadline_s
        options = self._rewriter.options_for(request.rewriting, self._images.family_of(request))
        try:
            rewrite = RewriteRequest(
                wish=request.prompt,
                options=options,
                deadline_s=deadline_s,
                priority=request.priority,
                client=request.client,
                share=request.share,
            )
            window = self._images.window_of(request, self._rewriter.window)
            image.rewrite_id = self._rewriter.submit_for(rewrite, window)
        except QueueFull:
            return BUSY
        except DiffserveError as error:
            if error.param == "style":
                raise
            return FAILED
        self._rewriting[image.rewrite_id] = image
        return None

    def _make_ready(self, image: PendingImage, prompt: str, warning: str | None) -> None:
        self._rewriting.pop(image.rewrite_id, None)
        image.prompt = prompt
        image.warnings = () if warning is None else (warning,)
        self._ready.append(image)

    def _hand_over(self, image: PendingImage) -> None:
        """Submit with the new prompt, or with the original one if that is refused. Raises the engine's errors."""
        try:
            self._submit(image)
        except InvalidRequest:
            if image.prompt == image.request.prompt:
                raise
            image.prompt, image.warnings = image.request.prompt, (FAILED,)
            self._submit(image)

    def _submit(self, image: PendingImage) -> None:
        request, waited_s = image.request, self._clock() - image.submitted_s
        left_s = None if request.deadline_s is None else request.deadline_s - waited_s
        if left_s is not None and left_s <= 0.0:
            raise DeadlineExceeded(
                f"the deadline of {request.deadline_s:g} s passed before the image was finished.", param="deadline_s"
            )
        self._engine.submit(msgspec.structs.replace(request, prompt=image.prompt, rewriting=None, deadline_s=left_s))
        original = None if image.prompt == request.prompt else request.prompt
        self._notes[request.request_id] = Note(waited_s, image.warnings, original, image.rewriting_s)

    def _find(self, request_id: str) -> PendingImage | None:
        images = (*self._rewriting.values(), *self._ready)
        return next((image for image in images if image.request.request_id == request_id), None)
