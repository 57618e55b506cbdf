"""Visitors of the page and their requests; each visitor can stop only their own.

A reloaded page is the same visitor: its tab stores a random token and sends it when it opens again. Its requests
continue for ``GRACE_S`` meanwhile, and its images are on disk, so that they survive a restart of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import gradio as gr
import msgspec

from diffserve.client import Asker, ask_for
from diffserve.media.decoders import ImageDecoder, shared_decoders
from ui.create.painting import FinishedPicture, Painting
from ui.create.parameters import CheckedForm, Form, StartFile
from ui.create.reference_files import References
from ui.files import PageFiles, owner_of
from ui.guard import bound, key_of
from ui.server import GRACE_S, Server

T = TypeVar("T")


class Galleries:
    """Images of visitors in ``files`` by owner, which is a digest of the visitor's token."""

    def __init__(self, files: PageFiles) -> None:
        self._files = files
        self._left = _read_notes(files.left)

    def keep(self, owner: str, picture: FinishedPicture) -> None:
        """Note the owner of ``picture``; if the disk is full, a later process will not show the image."""
        data = msgspec.json.encode(picture, enc_hook=lambda path: path.name)
        with contextlib.suppress(OSError):
            self._files.note(picture.path, owner, data)

    def take(self, owner: str) -> list[FinishedPicture]:
        """Return and forget the images of ``owner`` from an earlier process, the newest first."""
        return [picture for picture in self._left.pop(owner, []) if picture.path.is_file()]


def owner_of_token(token: str) -> str:
    """Return the owner name on disk of the visitor with ``token``."""
    return hashlib.sha256(token.encode()).hexdigest()


def _read_notes(folders: Iterable[Path]) -> dict[str, list[FinishedPicture]]:
    """Read the notes in ``folders``, the oldest folder first; unreadable notes are skipped."""
    pictures_by_owner: dict[str, list[FinishedPicture]] = {}
    for folder in folders:
        for note in folder.glob("*.json"):
            try:
                stored = msgspec.json.decode(
                    note.read_bytes(), type=FinishedPicture, dec_hook=lambda _, path: Path(path)
                )
            except (OSError, TypeError, msgspec.MsgspecError):
                continue
            picture = msgspec.structs.replace(stored, path=folder / stored.path.name)
            pictures_by_owner.setdefault(owner_of(note), []).insert(0, picture)
    return pictures_by_owner


MAX_PICTURES: Final = 24
"""Images in a gallery; the oldest are removed first."""

MAX_VISITORS: Final = 1000
MAX_EMPTY: Final = 100
"""Visitors without requests and images; a page whose visitor was removed gets a new one."""

MAX_TOKENS: Final = 4000
"""Files of visitors that left no note."""

NAME_CHARS: Final = 12
TOKEN: Final = re.compile(r"[0-9a-f]{32}")


class Visitor:
    """Browser tab with its open requests, in order, and its gallery, the newest image first.

    Attributes:
        batch: The images of one request that were last shown together.
        news: A counter that grows with every change.
        trouble: Why the last request failed; None once another one is accepted.
        grace_s: How many seconds requests continue while no page shows them.
        keep: Callback for every finished image.
        control: The file of the control image, None before one is chosen.
        references: The reference images.
        wish: The prompt before its last rewrite.
        rewrite: The prompt after it.
        asked: The image whose deletion waits for confirmation.
        name: A name of the tab that is the same after a restart of the server.
        expected: The IDs of the tab's unfinished jobs, whose images it will show, in order.
    """

    def __init__(self, grace_s: float = 0.0, pictures: Sequence[FinishedPicture] = (), name: str = "unknown") -> None:
        self.pictures = list(pictures[:MAX_PICTURES])
        self.batch: list[FinishedPicture] = []
        self.news = 0
        self.trouble: str | None = None
        self.control: Path | None = None
        self.references = References()
        self.wish = self.rewrite = ""
        self.asked: Path | None = None
        self.name = name
        self.expected: list[str] = []
        self.grace_s = grace_s
        self.keep: Callable[[FinishedPicture], None] | None = None
        self._start: Path | None = None
        self._paintings: list[Painting] = []
        self._latest: Painting | None = None
        self._changed = asyncio.Event()
        self._num_watching = 0
        self._end: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a request is open."""
        return bool(self.paintings)

    @property
    def is_empty(self) -> bool:
        """Whether this visitor has no state worth keeping, apart from an error message."""
        has_images = self.pictures or self.control or self.references or self._start
        return not (has_images or self.expected or self.is_busy or self._num_watching)

    @property
    def has_something(self) -> bool:
        """Whether there is a request, an image or an error to show."""
        return self.is_busy or bool(self.pictures) or self.trouble is not None

    @property
    def paintings(self) -> list[Painting]:
        """The open requests."""
        self._paintings = [painting for painting in self._paintings if not painting.is_over]
        return self._paintings

    @property
    def latest(self) -> list[FinishedPicture]:
        """The images of the latest request."""
        return self._latest.pictures if self._latest is not None else []

    @property
    def start(self) -> Path | None:
        """The image that is edited, while its file exists."""
        return self._start if self._start is not None and self._start.is_file() else None

    @start.setter
    def start(self, picture: Path | None) -> None:
        self._start = picture

    def settle(self, wish: str, prompt: str) -> None:
        """Note that ``wish`` was rewritten to ``prompt``, so that Generate paints either without another rewrite."""
        self.wish, self.rewrite = wish, prompt

    def is_settled(self, prompt: str) -> bool:
        """Whether ``prompt`` was just rewritten, or its rewrite was undone."""
        return bool(self.rewrite) and prompt in (self.wish, self.rewrite)

    def picture_at(self, path: object) -> FinishedPicture | None:
        """Return the gallery's image in the file ``path``, a text or gradio's file data; None if there is none."""
        name = path.get("path") if isinstance(path, dict) else path
        return next((each for each in self.pictures if str(each.path) == name and each.path.is_file()), None)

    def replace(self, picture: FinishedPicture, changed: FinishedPicture | None) -> None:
        """Put ``changed`` in the place of ``picture``, or remove that if None."""
        together = [] if changed is None else [changed]

        def replaced(pictures: list[FinishedPicture]) -> list[FinishedPicture]:
            return [new for each in pictures for new in (together if each.path == picture.path else [each])]

        self.pictures, self.batch = replaced(self.pictures), replaced(self.batch)
        if self._latest is not None:
            self._latest.pictures = replaced(self._latest.pictures)
        if changed is not None and self.keep is not None:
            self.keep(changed)

    def add(self, picture: FinishedPicture) -> None:
        """Add a ``picture`` that no request painted, and show it alone from now on."""
        self.batch = []
        if not self.is_busy:
            self._latest = None
        self._take(picture)

    def expect(self, job_id: str) -> None:
        """Note that this tab will show the images of a job, unless it has them already."""
        if job_id not in self.expected and all(picture.job != job_id for picture in self.pictures):
            self.trouble = None
            self.expected.append(job_id)
            self._take(None)

    def forget(self, job_id: str) -> bool:
        """Note that a job is over; return False if it was not expected."""
        if job_id not in self.expected:
            return False
        self.expected.remove(job_id)
        self._take(None)
        return True

    def receive(self, pictures: Sequence[FinishedPicture]) -> None:
        """Add the images of a job; a running request stays on display."""
        if not self.is_busy:
            self._latest = None
        for picture in pictures:
            self._take(picture)

    def begin_as(self, form: Form) -> None:
        """Remove the image to edit and the references if the settings in ``form`` do not use them."""
        if form.strength is None:
            self._start = None
        if not form.uses_references:
            self.references.clear()

    def paint(self, server: Server, request: CheckedForm | Form, start: StartFile | None = None) -> Painting:
        """Start the request ``request``, from the image ``start`` or from noise."""
        self.trouble = None
        painting = Painting(server, request, self._take, start)
        self._paintings.append(painting)
        self._latest = painting
        return painting

    def stop(self, *, keeps_unfinished: bool = False) -> int:
        """Stop all requests of this visitor as in ``Painting.stop``, and return their number."""
        paintings = list(self.paintings)
        for painting in paintings:
            painting.stop(keeps_unfinished=keeps_unfinished)
        return len(paintings)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the requests running while the block runs, because a page shows them."""
        self._num_watching += 1
        self._cancel_end()
        try:
            yield
        finally:
            self._num_watching -= 1
            self.end_soon()

    def end_soon(self) -> None:
        """Stop all requests after ``grace_s``, unless a page shows them by then."""
        self._cancel_end()
        if self._num_watching or not self.is_busy:
            return
        if self.grace_s <= 0:
            self.stop()
        else:
            self._end = asyncio.get_running_loop().call_later(self.grace_s, self.stop)

    async def wait_for_news(self, last_news: int, seconds: float) -> None:
        """Wait until ``news`` differs from ``last_news``, at most ``seconds``."""
        if self.news != last_news:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _cancel_end(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def _take(self, picture: FinishedPicture | None) -> None:
        if picture is not None:
            self.pictures = [picture, *self.pictures][:MAX_PICTURES]
            if self.keep is not None:
                self.keep(picture)
        self.news += 1
        self._changed.set()
        self._changed = asyncio.Event()


class Visitors:
    """All open pages by gradio session, and recent ones by token."""

    def __init__(self, files: PageFiles | None = None, *, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()
        self._tokens: OrderedDict[str, str] = OrderedDict()
        self._look_at = MAX_EMPTY
        self._galleries: Galleries | None = None
        if files is not None:
            self._galleries = Galleries(files)
            files.stays = lambda: {owner_of_token(token) for token in self._tokens.values()}

    def arrive(self, session: str | None, token: str | None, key_id: str = "") -> Visitor:
        """Return the visitor of ``session``, whose tab has ``token`` and whose API key is ``key_id``.

        A tab that is reloaded is the same visitor, but only with the same key.
        """
        if session and token and TOKEN.fullmatch(token) and session not in self._visitors:
            self._tokens[session] = bound(token, key_id)
        return self.of(session)

    def _new(self, session: str) -> Visitor:
        """Create the visitor of ``session``, with the images of an earlier process if its token is known."""
        token = self._tokens.get(session)
        owner = owner_of_token(token or session)
        name = owner[:NAME_CHARS]
        if token is None:
            return Visitor(name=name)
        if self._galleries is None:
            return Visitor(self._grace_s, name=name)
        visitor = Visitor(self._grace_s, self._galleries.take(owner), name)
        visitor.keep = functools.partial(self._galleries.keep, owner)
        return visitor

    def of(self, session: str | None) -> Visitor:
        """Return the visitor of ``session``, created if needed; without a session, a temporary one."""
        if not session:
            return Visitor()
        key = self._tokens.get(session, session)
        visitor = self._visitors.get(key) or self._new(session)
        self._visitors[key] = visitor
        self._visitors.move_to_end(key)
        self._forget(key)
        return visitor

    def rewrite_of(self, session: str | None) -> tuple[str, str]:
        """Return wish and prompt of the last rewrite in ``session``, empty before it has one; no visitor is created."""
        visitor = self._visitors.get(self._tokens.get(session or "", session or ""))
        return ("", "") if visitor is None else (visitor.wish, visitor.rewrite)

    def leave(self, session: str | None) -> None:
        """Stop the requests of a closed page: at once without a token, else after the grace period."""
        token = self._tokens.pop(session or "", None)
        visitor = self._visitors.get(token) if token else self._visitors.pop(session or "", None)
        if visitor is None:
            return
        if token:
            visitor.end_soon()
        else:
            visitor.stop()

    def _forget(self, here: str) -> None:
        """Remove empty visitors and those idle for longest if there are too many; never the visitor ``here``."""
        if len(self._visitors) > self._look_at:
            for key in [key for key, visitor in self._visitors.items() if visitor.is_empty and key != here]:
                del self._visitors[key]
            self._look_at = len(self._visitors) + MAX_EMPTY
        if len(self._visitors) > MAX_VISITORS:
            for key, visitor in list(self._visitors.items())[: len(self._visitors) - MAX_VISITORS]:
                if not visitor.is_busy:
                    del self._visitors[key]
        if len(self._tokens) > MAX_TOKENS:
            self._tokens = OrderedDict(
                (session, token) for session, token in self._tokens.items() if token in self._visitors
            )
        while len(self._tokens) > MAX_TOKENS:
            self._tokens.popitem(last=False)


MOST_CHARS = 500


def ask_for_visitor(request: gr.Request) -> None:
    """Send all later client requests of this context on behalf of the visitor that sent ``request``."""
    ask_for(Asker(_addresses(request), request.session_hash or "", key_of(request)))


async def decoded(request: gr.Request, read: Callable[[ImageDecoder], T]) -> T:
    """Return ``read(decoder)`` in a thread, when it is the turn of the key or address that sent ``request``."""
    return await shared_decoders().run(f"page/{key_of(request) or _addresses(request)}", read)


def _addresses(request: gr.Request) -> str:
    """Return the addresses that proxies report, and the one that the request came from."""
    forwarded = ",".join(value for name, value in request.headers.items() if name.lower() == "x-forwarded-for")
    host = request.client.host if request.client is not None else ""
    return f"{forwarded},{host}"[-MOST_CHARS:]
