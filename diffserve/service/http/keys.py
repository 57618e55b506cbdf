"""API keys: authentication and authorization of requests, sessions, and rate limits.

A user that a trusted proxy has authenticated counts as a key (``proxied_users``). Otherwise a key is sent as
``Authorization: Bearer KEY``, as the password of ``Authorization: Basic`` (A1111's clients), as ``X-Api-Key``, or as a
session: a signed cookie from ``/login``. A server that never had a key accepts requests without one. This is
middleware rather than a dependency because it also guards the mounted page.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Final

import msgspec
from cachetools import LRUCache
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffserve.api.errors import QueueFull
from diffserve.client.on_behalf import HEADER, asker_in, own_key
from diffserve.service.http.addresses import prefix_of
from diffserve.service.http.errors import HttpError, reply_for
from diffserve.service.http.proxied_users import proxied_user
from diffserve.service.http.revocation import LOOK_EVERY_S, ActiveRequests, WatchedRequest
from diffserve.service.threads import KEYS
from diffserve.store.database import Database
from diffserve.store.errors import StoreError
from diffserve.store.keys import USER_ID_PREFIX, Key, Keys, digest_of, user_id
from diffserve.store.keys import Scope as KeyScope

LOGIN: Final = "/login"
OPEN: Final = frozenset({"/livez", "/readyz", "/health", "/ping", LOGIN})
"""Paths that need no key."""

PAGE: Final = "/gradio_api/"
CREATING: Final = ("POST", "PUT")
"""Methods that count against a key's limit of requests per minute."""

READ_S: Final = 5.0
"""How long requests wait until the keys are read from the database."""

COOKIE: Final = "diffserve_session"
SESSION_S: Final = 30 * 24 * 3600.0
MAX_KEY_CHARS: Final = 512
MAX_BUCKETS: Final = 10_000
ENV_KEY: Final = "DIFFSERVE_API_KEY"
OF_ENV: Final = "key-environment"

OF_PAGE: Final = Key(id="key-page", name="page", digest=b"", scopes=("generate",), created_s=0.0)
"""Key of requests that the page of this process sends for itself."""

log = logging.getLogger("diffserve.http")


class KeyRing:
    """Valid API keys; ``refresh`` reloads them when the database has changed.

    Args:
        database: Contains the keys.
        env_key: A key from the environment, with all permissions.
        has_users: Whether a proxy authenticates users; requests without a user then need a key.
        clock: Returns the time in seconds since 1970.
        user_limits: The defaults of a user: values of ``Key``, such as ``images_per_day``.
    """

    def __init__(
        self,
        database: Database,
        env_key: str = "",
        clock: Callable[[], float] = time.time,
        *,
        has_users: bool = False,
        user_limits: Mapping[str, float] | None = None,
    ) -> None:
        self._user_limits = dict(user_limits or {})
        self._database = database
        self._keys = Keys(database)
        self._env_digest = digest_of(env_key) if env_key else b""
        self._clock = clock
        self._secret = database.secret("sessions")
        self._stamp: object = None
        self._mark: object = None
        self._looked_s = -math.inf
        self._reading: asyncio.Future[None] | None = None
        self._has_failed = False
        self._good: dict[bytes, Key] = {}
        self._ended: frozenset[str] = frozenset()
        self._revoked: frozenset[str] = frozenset()
        self._has_users = has_users
        self.is_closed = has_users
        self.look()

    async def refresh(self) -> None:
        """Reload the keys if they changed, at most every ``LOOK_EVERY_S``.

        A database that does not answer delays this once, by ``READ_S`` at most; the keys read before stay valid.
        """
        if self._reading is None or self._reading.done():
            if time.monotonic() - self._looked_s < LOOK_EVERY_S:
                return
            self._looked_s = time.monotonic()
            self._reading = asyncio.ensure_future(KEYS.run(self.look))
        left_s = self._looked_s + READ_S - time.monotonic()
        if left_s > 0.0 and not self._has_failed:
            await asyncio.wait({self._reading}, timeout=left_s)

    def look(self) -> None:
        """Reload the keys if they changed; call it in a thread. A closed key ring stays closed."""
        stamp = self._database.stamp
        if stamp == self._stamp:
            return
        try:
            mark = self._keys.mark()
            self._has_failed = False
            if mark == self._mark:
                self._stamp = stamp
                return
            keys = self._keys.all()
            self._ended = self._keys.ended_sessions()
        except StoreError as error:
            self._has_failed = True
            log.error("the API keys cannot be read; the keys read before stay valid", extra={"reason": str(error)})
            return
        self._stamp, self._mark = stamp, mark
        self._good = {key.digest: key for key in keys if key.revoked_s is None}
        self._revoked = frozenset(key.id for key in keys if key.revoked_s is not None)
        if self._env_digest:
            env_key = Key(id=OF_ENV, name=ENV_KEY, digest=self._env_digest, scopes=("admin",), created_s=0.0)
            self._good[self._env_digest] = env_key
        self.is_closed = self.is_closed or bool(keys) or bool(self._env_digest)

    def find(self, text: str) -> Key | None:
        """Return the valid key with the text ``text``, or None."""
        digest = digest_of(text)
        key = self._good.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    def session(self, key: Key) -> str:
        """Return a new session for ``key``, which a browser stores in a cookie."""
        claims = f"{key.id}.{int(self._clock() + SESSION_S)}.{secrets.token_hex(8)}"
        return f"{claims}.{self._signed(claims, key)}"

    def key_of_session(self, text: str) -> Key | None:
        """Return the key of a session, or None if the session or its key is not valid."""
        claims, _, signature = text[:MAX_KEY_CHARS].rpartition(".")
        key = self.by_id(claims.partition(".")[0])
        if key is None or self._expires_s(claims) < self._clock() or signature in self._ended:
            return None
        return key if hmac.compare_digest(self._signed(claims, key).encode(), signature.encode()) else None

    def end_session(self, text: str) -> None:
        """End a session in every process that uses the same database; call it in a thread."""
        if self.key_of_session(text) is None:
            return
        claims, _, signature = text.rpartition(".")
        self._keys.end_session(signature, self._expires_s(claims))
        self._ended |= {signature}

    @staticmethod
    def _expires_s(claims: str) -> float:
        """Return when a session that begins with ``claims`` expires, in seconds since 1970; 0 if it is malformed."""
        expires = claims.split(".")[1:2]
        return float(expires[0][:12]) if expires and expires[0].isascii() and expires[0].isdigit() else 0.0

    def is_good(self, key_id: str, session: str) -> bool:
        """Return whether a key, and the session if there is one, are valid."""
        return self.by_id(key_id) is not None if not session else self.key_of_session(session) is not None

    def by_id(self, name: str) -> Key | None:
        """Return the valid key with this ID, or None. A user without limits of its own has the defaults."""
        stored = next((key for key in self._good.values() if key.id == name), None)
        if not name.startswith(USER_ID_PREFIX) or not self._has_users or name in self._revoked:
            return stored
        user = stored or Key(id=name, name=name, digest=b"", scopes=("generate",), created_s=0.0)
        unset = {field: value for field, value in self._user_limits.items() if getattr(user, field) is None}
        return msgspec.structs.replace(user, **unset)

    def _signed(self, claims: str, key: Key) -> str:
        return hmac.new(self._secret, claims.encode() + key.digest, hashlib.sha256).hexdigest()


class RateLimited(QueueFull):
    """Error of a key that exceeds its rate limit; ``headers`` describe the limit."""

    default_code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float, headers: dict[str, str]) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.headers = headers


class RateLimits:
    """Token bucket per key, which holds one minute's requests; ``clock`` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: LRUCache[str, tuple[float, float]] = LRUCache(MAX_BUCKETS)

    def take(self, key: Key) -> dict[str, str]:
        """Count one request and return the headers that describe the limit. Raises RateLimited if it is exceeded."""
        limit = key.requests_per_minute
        if limit is None:
            return {}
        now_s = self._clock()
        left, updated_s = self._buckets.get(key.id, (float(limit), now_s))
        left = min(float(limit), left + (now_s - updated_s) * limit / 60.0)
        has_room = left >= 1.0
        left -= has_room
        self._buckets[key.id] = (left, now_s)
        if not has_room:
            again_s = (1.0 - left) * 60.0 / limit
            message = f"this key is limited to {limit} requests per minute; try again in {again_s:.1f} s."
            raise RateLimited(message, retry_after_s=again_s, headers=_limit_headers(limit, left))
        return _limit_headers(limit, left)


def _limit_headers(limit: int, left: float) -> dict[str, str]:
    """Return OpenAI's headers of a limit of ``limit`` requests a minute, of which ``left`` remain."""
    return {
        "x-ratelimit-limit-requests": str(limit),
        "x-ratelimit-remaining-requests": str(int(left)),
        "x-ratelimit-reset-requests": f"{(limit - left) * 60.0 / limit:.1f}s",
    }


class KeyGuard:
    """Middleware that refuses requests without a key that permits the path.

    Paths in ``OPEN`` need no key, nor do paths below ``open_below``, whose names cannot be guessed.
    """

    def __init__(self, app: ASGIApp, *, ring: KeyRing, open_below: tuple[str, ...] = ()) -> None:
        self.open_below = open_below
        self.app = app
        self.ring = ring
        self.limits = RateLimits()
        self.active = ActiveRequests(ring.refresh, ring.is_good)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if its key permits it, else answer with an error or redirect a browser to the login."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path: str = scope["path"]
        if path in OPEN or path.startswith(self.open_below):
            await self.app(scope, receive, send)
            return
        await self.ring.refresh()
        if not self.ring.is_closed:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            limit_headers = self._authorize(scope, headers)
        except (HttpError, RateLimited) as error:
            scope.setdefault("state", {})["error_code"] = error.code
            if is_visit(scope, headers) and isinstance(error, HttpError) and error.status == 401:
                await RedirectResponse(f"{prefix_of(scope)}{LOGIN}", status_code=303)(scope, receive, send)
                return
            send = _with_headers(send, error.headers) if isinstance(error, RateLimited) else send
            await reply_for(scope["path"], error).response(scope, receive, send)
            return
        send = _with_headers(send, limit_headers) if limit_headers else send
        key_id = scope["state"]["key_id"]
        if key_id in ("", OF_PAGE.id):
            await self.app(scope, receive, send)
            return
        session = "" if key_in(headers) or proxied_user(scope) else session_in(headers)
        with self.active.watched(WatchedRequest((key_id, session), scope, receive, send)) as request:
            await self.app(scope, request.receive, request.send)
            await request.finish()

    def _authorize(self, scope: Scope, headers: Headers) -> dict[str, str]:
        """Store the key of a request in its state and return response headers. Raises HttpError, RateLimited."""
        visitor = asker_in(headers.get(HEADER))
        if visitor is not None:  # the page of this process, whose visitor has logged in with a key
            scope.setdefault("state", {})["key_id"] = visitor.key_id
            key = self.ring.by_id(visitor.key_id)
            scope["state"]["key_share"] = 1.0 if key is None else key.share
            return {} if key is None or scope["method"] not in CREATING else self.limits.take(key)
        key = self._key(scope, headers)
        needed = scope_of(scope["path"])
        if not key.allows(needed):
            raise HttpError(403, f"the API key lacks the scope {needed}.", code="insufficient_permissions")
        scope.setdefault("state", {}).update(key_id=key.id, key_share=key.share)
        # the page sends its own requests for work
        is_work = scope["method"] in CREATING and not scope["path"].startswith(PAGE)
        return self.limits.take(key) if is_work else {}

    def _key(self, scope: Scope, headers: Headers) -> Key:
        text = key_in(headers)
        if hmac.compare_digest(text.encode("utf-8", "replace"), own_key().encode()):
            return OF_PAGE
        if user := proxied_user(scope):
            key = self.ring.by_id(user_id(user))
            if key is None:
                raise HttpError(403, "this user is blocked.", code="user_blocked")
            return key
        if text:
            key = self.ring.find(text)
        else:
            session = session_in(headers)
            key = self.ring.key_of_session(session) if session else None
        if key is not None:
            return key
        reason = "invalid API key" if text else "an API key is required: send Authorization: Bearer KEY"
        raise HttpError(401, f"{reason}.", code="invalid_api_key")


def key_in(headers: Headers) -> str:
    """Return the key in the headers, or "". A malformed header gives a text that is never a valid key."""
    values = headers.getlist("authorization")
    if len(values) > 1:
        return "\0"
    kind, _, credentials = (values[0] if values else "").strip().partition(" ")
    credentials = credentials.strip()
    if kind.lower() == "bearer":
        return credentials[:MAX_KEY_CHARS] or "\0"
    if kind.lower() == "basic":
        try:
            decoded = base64.b64decode(credentials[: 4 * MAX_KEY_CHARS], validate=True).decode("utf-8", "replace")
        except (binascii.Error, ValueError):
            return "\0"
        name, _, password = decoded.partition(":")
        return (password or name)[:MAX_KEY_CHARS]
    return headers.get("x-api-key", "")[:MAX_KEY_CHARS]


def session_in(headers: Headers) -> str:
    """Return the session in the cookies, or ""."""
    cookies: SimpleCookie = SimpleCookie()
    try:
        cookies.load(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[COOKIE].value if COOKIE in cookies else ""


def scope_of(path: str) -> KeyScope:
    """Return the scope that a key needs for ``path``."""
    if path.rstrip("/") == "/metrics":
        return "metrics"
    return "admin" if path.startswith("/debug/") or path.rstrip("/").endswith("/usage/keys") else "generate"


def is_visit(scope: Scope, headers: Headers) -> bool:
    """Return whether a browser opens the page."""
    return scope["path"] == "/" and scope["method"] == "GET" and "text/html" in headers.get("accept", "")


def _with_headers(send: Send, headers: dict[str, str]) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers)
        await send(message)

    return send_with_headers
