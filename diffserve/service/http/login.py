"""Login page: ``/login`` exchanges a key for a session cookie, ``/logout`` ends the session."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from diffserve.service.http.addresses import prefix_of, public_address
from diffserve.service.http.errors import HttpError
from diffserve.service.http.forms import read_form
from diffserve.service.http.keys import COOKIE, LOGIN, MAX_KEY_CHARS, SESSION_S, KeyRing, session_in
from diffserve.service.threads import LISTINGS

LOGOUT: Final = "/logout"
FORM: Final = "application/x-www-form-urlencoded"
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'"
PAGE: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>diffserve</title>
<meta name="viewport" content="width=device-width"><style>
body {{ font-family: system-ui, sans-serif; margin: 4rem auto; max-width: 24rem; padding: 0 1rem }}
:root {{ color-scheme: light dark }}
input, button {{ font: inherit; padding: .6rem; width: 100%; box-sizing: border-box; margin-top: .5rem }}
button {{ background: #11766e; color: #fff; border: 0; border-radius: .5rem }}
</style></head><body><main><h1>diffserve</h1><form method="post" action="{prefix}/login">
<label for="key">API key</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<button>Sign in</button></form><p role="alert">{message}</p></main></body></html>"""


def add_login(app: FastAPI, ring: KeyRing) -> None:
    """Add the login and logout routes to ``app``."""

    @app.get(LOGIN, summary="Form for an API key", response_class=HTMLResponse)
    async def ask(request: Request) -> Response:
        return _page("", prefix_of(request.scope))

    page = {
        "content": {"text/html": {"schema": {"type": "string"}}},
        "description": "The login form with an error message.",
    }
    sent = {"type": "object", "required": ["key"], "properties": {"key": {"type": "string"}}}
    form = {"requestBody": {"required": True, "content": {FORM: {"schema": sent}}}}
    to_page: dict[int | str, dict[str, Any]] = {
        303: {"description": "Redirect to the page, with a session cookie."},
        401: page,
    }

    @app.post(
        LOGIN, summary="Exchange an API key for a session", openapi_extra=form, responses=to_page, status_code=303,
        response_class=RedirectResponse,
    )  # fmt: skip
    async def enter(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != FORM:
            raise HttpError(415, f"send the key as a form ({FORM}).", code="unsupported_media_type")
        prefix = prefix_of(request.scope)
        text = (await read_form(request, max_files=0)).fields.get("key", "")
        await ring.refresh()
        key = ring.find(text.strip()[:MAX_KEY_CHARS]) if isinstance(text, str) else None
        if key is None or not key.allows("generate"):
            return _page("Invalid key." if key is None else "This key lacks the scope generate.", prefix, 401)
        answer = RedirectResponse(f"{prefix}/", status_code=303)
        address = public_address(request.scope)
        is_https = (request.url.scheme if address is None else address.origin.partition(":")[0]) == "https"
        answer.set_cookie(
            COOKIE, ring.session(key), max_age=int(SESSION_S), path=prefix or "/", httponly=True, samesite="strict",
            secure=is_https,
        )  # fmt: skip
        return answer

    @app.post(LOGOUT, summary="End the session", status_code=303, response_class=RedirectResponse)
    async def leave(request: Request) -> Response:
        await ring.refresh()
        await LISTINGS.run(ring.end_session, session_in(request.headers))
        prefix = prefix_of(request.scope)
        answer = RedirectResponse(f"{prefix}{LOGIN}", status_code=303)
        answer.delete_cookie(COOKIE, path=prefix or "/", httponly=True, samesite="strict")
        return answer


def _page(message: str, prefix: str, status: int = 200) -> Response:
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-store", "Referrer-Policy": "same-origin"}
    return HTMLResponse(PAGE.format(message=message, prefix=prefix), status, headers=headers)
