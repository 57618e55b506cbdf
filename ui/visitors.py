"""Who is at the page, and what is being painted for whom. Nobody stops anything but what is their own.

A page that is reloaded is the same visitor: its tab keeps a token that nobody can guess, and hands it over when it
comes back. What it had asked for goes on meanwhile, for as long as ``GRACE_S``; its pictures are on disk, so that it
finds them again when its server was started anew.
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
from diffserve.media.decoders import Decoder, shared_decoders
from ui.create.painting import FinishedPicture, Painting
from ui.create.parameters import CheckedForm, Form, StartFile
from ui.files import PageFiles, owner_of
from ui.ownership import bound, key_of
from ui.server import GRACE_S, Server

T = TypeVar("T")


class Galleries:
    """Visitors' pictures in ``files``, by their owner: a digest of the visitor's token, which itself lies nowhere."""

    def __init__(self, files: PageFiles) -> None:
        self._files = files
        self._left = _found(files.left)

    def keep(self, owner: str, picture: FinishedPicture) -> None:
        """Note whose ``picture`` it is. Where the disk is full it is merely not found again."""
        data = msgspec.json.encode(picture, enc_hook=lambda path: path.name)
        with contextlib.suppress(OSError):
            self._files.note(picture.path, owner, data)

    def take(self, owner: str) -> list[FinishedPicture]:
        """Pictures of ``owner`` from the process before this one, the newest first; once."""
        return [picture for picture in self._left.pop(owner, []) if picture.path.is_file()]


def owner_named(token: str) -> str:
    """How the visitor with ``token`` is called on disk."""
    return hashlib.sha256(token.encode()).hexdigest()


def _found(folders: Iterable[Path]) -> dict[str, list[FinishedPicture]]:
    """What notes in ``folders`` tell of, the oldest folder first; what cannot be read is passed over."""
    found: dict[str, list[FinishedPicture]] = {}
    for folder in folders:
        for note in folder.glob("*.json"):
            try:
                told = msgspec.json.decode(note.read_bytes(), type=FinishedPicture, dec_hook=lambda _, path: Path(path))
            except (OSError, TypeError, msgspec.MsgspecError):
                continue
            picture = msgspec.structs.replace(told, path=folder / told.path.name)
            found.setdefault(owner_of(note), []).insert(0, picture)
    return found


MAX_PICTURES: Final = 24
"""In a gallery; the oldest go first."""

MAX_VISITORS: Final = 1000
MAX_EMPTY: Final = 100
"""Visitors for whom nothing is painted and nothing was; a page that comes back to none is given a new one."""

MAX_TOKENS: Final = 4000
"""Of pages that nobody told had left."""

TOKEN: Final = re.compile(r"[0-9a-f]{32}")


class Visitor:
    """One tab of a browser: its paintings in the order in which they were asked for, and its gallery, the newest first.

    batch    pictures of one request that were last shown together
    news     grows whenever something changes
    trouble  why the last request came to nothing, ``None`` once another one is taken
    grace_s  for how long paintings go on while nobody watches
    keep     is told of every picture
    control  the file of the picture that their ControlNet goes by, ``None`` before there is one
    """

    def __init__(self, grace_s: float = 0.0, pictures: Sequence[FinishedPicture] = ()) -> None:
        self.pictures = list(pictures[:MAX_PICTURES])
        self.batch: list[FinishedPicture] = []
        self.news = 0
        self.trouble: str | None = None
        self.control: Path | None = None
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
        """Whether anything is being painted."""
        return bool(self.paintings)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is lost with this visitor but why a request came to nothing."""
        return not (self.pictures or self.control or self.is_busy or self._num_watching or self._start)

    @property
    def has_something(self) -> bool:
        """Whether there is anything to be shown."""
        return self.is_busy or bool(self.pictures) or self.trouble is not None

    @property
    def paintings(self) -> list[Painting]:
        """Those that are not over."""
        self._paintings = [painting for painting in self._paintings if not painting.is_over]
        return self._paintings

    @property
    def latest(self) -> list[FinishedPicture]:
        """What the last request has brought."""
        return self._latest.pictures if self._latest is not None else []

    @property
    def start(self) -> Path | None:
        """The picture that is edited, while it is on disk."""
        return self._start if self._start is not None and self._start.is_file() else None

    @start.setter
    def start(self, picture: Path | None) -> None:
        self._start = picture

    def begin_as(self, form: Form) -> None:
        """Begin from noise where the picture did that ``form`` is of."""
        if form.strength is None:
            self._start = None

    def paint(self, server: Server, asked: CheckedForm | Form, start: StartFile | None = None) -> Painting:
        """Begin to paint what is ``asked`` for, from ``start`` or from noise."""
        self.trouble = None
        painting = Painting(server, asked, self._take, start)
        self._paintings.append(painting)
        self._latest = painting
        return painting

    def stop(self, *, keeps_unfinished: bool = False) -> int:
        """End all paintings of this visitor (see :meth:`Painting.stop`), and return how many there were."""
        paintings = list(self.paintings)
        for painting in paintings:
            painting.stop(keeps_unfinished=keeps_unfinished)
        return len(paintings)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Somebody sees what is painted. When the last one has gone, it ends after ``grace_s``."""
        self._num_watching += 1
        self._stay()
        try:
            yield
        finally:
            self._num_watching -= 1
            self.end_soon()

    def end_soon(self) -> None:
        """Where nobody watches: end everything after ``grace_s``, unless somebody comes."""
        self._stay()
        if self._num_watching or not self.is_busy:
            return
        if self.grace_s <= 0:
            self.stop()
        else:
            self._end = asyncio.get_running_loop().call_later(self.grace_s, self.stop)

    async def wait_for_news(self, seen: int, seconds: float) -> None:
        """Until ``news`` is no longer ``seen``, ``seconds`` at most."""
        if self.news != seen:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _stay(self) -> None:
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
    """All open pages, by the session that gradio gives each of them, and those that may come back, by their token."""

    def __init__(self, files: PageFiles | None = None, *, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()
        self._tokens: OrderedDict[str, str] = OrderedDict()
        self._look_at = MAX_EMPTY
        self._galleries: Galleries | None = None
        if files is not None:
            self._galleries = Galleries(files)
            files.stays = lambda: {owner_named(token) for token in self._tokens.values()}

    def arrive(self, session: str | None, token: str | None, key_id: str = "") -> Visitor:
        """Return the visitor of ``session``, whose tab has ``token`` and whose API key is ``key_id``.

        A tab that is reloaded is the same visitor, but only with the same key.
        """
        if session and token and TOKEN.fullmatch(token) and session not in self._visitors:
            self._tokens[session] = bound(token, key_id)
        return self.of(session)

    def _new(self, session: str) -> Visitor:
        """Who may have been here when another process served the page, where ``session`` has a token."""
        token = self._tokens.get(session)
        if token is None:
            return Visitor()
        owner = owner_named(token)
        if self._galleries is None:
            return Visitor(self._grace_s)
        visitor = Visitor(self._grace_s, self._galleries.take(owner))
        visitor.keep = functools.partial(self._galleries.keep, owner)
        return visitor

    def of(self, session: str | None) -> Visitor:
        """The visitor of ``session``, a new one where it is not known; without a session, one for this call alone."""
        if not session:
            return Visitor()
        key = self._tokens.get(session, session)
        visitor = self._visitors.get(key) or self._new(session)
        self._visitors[key] = visitor
        self._visitors.move_to_end(key)
        self._forget(key)
        return visitor

    def leave(self, session: str | None) -> None:
        """The page was closed: its paintings end, at once where it cannot come back."""
        token = self._tokens.pop(session or "", None)
        visitor = self._visitors.get(token) if token else self._visitors.pop(session or "", None)
        if visitor is None:
            return
        if token:
            visitor.end_soon()
        else:
            visitor.stop()

    def _forget(self, here: str) -> None:
        """Those who have nothing, once they are many, and those that have been idle for longest, where nobody told that
        they left; never the visitor ``here``.
        """
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
    """From now on what is asked in this context, and in tasks that begin in it, is asked for whoever sent
    ``request``.
    """
    ask_for(Asker(_addresses(request), request.session_hash or "", key_of(request)))


async def decoded(request: gr.Request, read: Callable[[Decoder], T]) -> T:
    """Return ``read(decoder)`` in a thread, when it is the turn of the key or address that sent ``request``."""
    return await shared_decoders().run(f"page/{key_of(request) or _addresses(request)}", read)


def _addresses(request: gr.Request) -> str:
    """Return the addresses that proxies report, and the one that the request came from."""
    forwarded = ",".join(value for name, value in request.headers.items() if name.lower() == "x-forwarded-for")
    host = request.client.host if request.client is not None else ""
    return f"{forwarded},{host}"[-MOST_CHARS:]
