"""Who may see the page: anybody on this machine, who knows the password, or whom a proxy names."""

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qs

import anyio
import anyio.to_thread
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from relatum_consumer.web._limits import Bucket, Proxies, client_of
from relatum_consumer.web._links import FOR_PROGRAMS, Links
from relatum_consumer.web._options import WebOptions
from relatum_consumer.web._passwords import is_password
from relatum_consumer.web._problems import Problem
from relatum_consumer.web._rendering import HAS_SESSION, Rendering

COOKIE: Final = "relatum_session"

SESSION_S: Final = 12 * 3600
"""Seconds after which one logs in again."""

_TRIES: Final = 5
"""Wrong passwords of one client in a moment; after them, as many a minute."""

_CLIENTS_MAX: Final = 10_000

_FORM_BYTES_MAX: Final = 4_096

_FORM_S: Final = 10.0
"""Seconds for a form to come."""

_HASHED_AT_ONCE: Final = 2
"""Passwords compared at the same time: each takes 16 MiB and a processor."""

_ENDED_MAX: Final = 10_000
"""Sessions that were logged out of and are remembered; one more ends all there are, so that none comes back."""

_OPEN: Final = ("/static/", "/login")


class Access:
    """Lets through who may see the page, and asks others to log in.

    Sessions are cookies signed by a secret of this process: they end with it, or by a logout, which it remembers.
    """

    def __init__(
        self, app: ASGIApp, options: WebOptions, links: Links, rendering: Rendering, clock: Callable[[], float]
    ) -> None:
        self._app = app
        self._clock = clock
        self._options = options
        self._links = links
        self._rendering = rendering
        self._secret = secrets.token_bytes(32)
        self._proxies = Proxies(options)
        # Until when they would have held.
        self._ended: dict[str, int] = {}
        self._wrong: dict[str, Bucket] = {}
        self._hashing = anyio.CapacityLimiter(_HASHED_AT_ONCE)
        # The digest of a password that was right: scripts send theirs with each request.
        self._known: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a request of somebody who may ask."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        who = "-" if self._is_open else await self._who(scope)
        if scope["path"] == "/login":
            response = await self._login(Request(scope, receive))
            await response(scope, receive, send)
        elif scope["path"] == "/logout" and self._options.password_hash is not None:
            await self._logout(scope)(scope, receive, send)
        elif who is None and not scope["path"].startswith(_OPEN):
            await self._ask(scope)(scope, receive, send)
        else:
            state = scope.setdefault("state", {})
            state["who"] = who or "-"
            token = HAS_SESSION.set("session_until" in state)
            try:
                await self._app(scope, receive, send)
            finally:
                HAS_SESSION.reset(token)

    @property
    def _is_open(self) -> bool:
        return self._options.password_hash is None and self._options.trust_header is None

    async def _who(self, scope: Scope) -> str | None:
        """The name of who asks; None where that is not known."""
        headers = Headers(scope=scope)
        named = self._proxies.name_of(scope)
        if named:
            return named
        if self._options.password_hash is None:
            return None
        cookies = headers.get("cookie", "")
        has_session = self._session_until(cookies) > 0
        if has_session:
            # Asked again by what goes on: a logout ends that, too.
            scope.setdefault("state", {})["session_until"] = partial(self._session_until, cookies)
        return "password" if has_session or await self._has_password(scope, headers) else None

    # --- the cookie ---------------------------------------------------------------------------------------

    def _session(self) -> str:
        body = f"{int(time.time()) + SESSION_S}.{secrets.token_hex(8)}"
        return f"{body}.{self._sign(body)}"

    def _sign(self, body: str) -> str:
        return hmac.new(self._secret, body.encode("latin-1"), hashlib.sha256).hexdigest()

    def _session_until(self, cookies: str) -> int:
        """Until when a session holds, in seconds since 1970; 0 where there is none."""
        body = self._signed(cookies)
        until = int(body.partition(".")[0]) if body and body not in self._ended else 0
        return until if until > time.time() else 0

    def _signed(self, cookies: str) -> str:
        """What this process signed; empty where that is nothing."""
        try:
            morsel = SimpleCookie(cookies).get(COOKIE)
        except CookieError:
            return ""
        body, _, signature = (morsel.value if morsel else "").rpartition(".")
        if not hmac.compare_digest(signature.encode("latin-1", "replace"), self._sign(body).encode()):
            return ""
        return body

    def _logout(self, scope: Scope) -> Response:
        if scope["method"] != "POST":
            problem = Problem(405, "method_not_allowed", "one logs out by POST", "", {"Allow": "POST"})
            return self._rendering.problem(problem, scope)
        cookies = Headers(scope=scope).get("cookie", "")
        if until := self._session_until(cookies):
            self._end(self._signed(cookies), until)
        response = self._form({}, done="You are logged out.")
        response.delete_cookie(
            COOKIE, f"{self._links.root_path}/", secure=self._options.is_https, httponly=True, samesite="strict"
        )
        return response

    def _end(self, body: str, until: int) -> None:
        now = time.time()
        self._ended = {each: end for each, end in self._ended.items() if end > now} | {body: until}
        if len(self._ended) > _ENDED_MAX:
            self._secret, self._ended = secrets.token_bytes(32), {}

    # --- the password -------------------------------------------------------------------------------------

    async def _has_password(self, scope: Scope, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if not scope["path"].startswith(FOR_PROGRAMS):
            return False
        password = _password_of(kind.lower(), given)
        if password is None:
            return False
        digest = self._sign(password.encode().hex()).encode()
        if self._known is not None and hmac.compare_digest(digest, self._known):
            return True
        if not await self._is_right(client_of(scope), password):
            return False
        self._known = digest
        return True

    async def _is_right(self, client: str, password: str) -> bool:
        """Whether it is the password; not even tried where the client was wrong too often."""
        now = self._clock()
        if client not in self._wrong and len(self._wrong) >= _CLIENTS_MAX:
            self._wrong.clear()
        bucket = self._wrong.setdefault(client, Bucket(_TRIES / 60, _TRIES, _TRIES, now))
        if bucket.take(1, now) or self._options.password_hash is None:
            return False
        hashed = self._options.password_hash
        if await anyio.to_thread.run_sync(is_password, password, hashed, limiter=self._hashing):
            bucket.left = bucket.most
            return True
        return False

    async def _login(self, request: Request) -> Response:
        if self._options.password_hash is None:
            return RedirectResponse(self._links.search(), 303)
        if request.method in ("GET", "HEAD"):
            return self._form({})
        if request.method != "POST":
            problem = Problem(
                405, "method_not_allowed", f"{request.method} is not known here", "", {"Allow": "GET, POST"}
            )
            return self._rendering.problem(problem, request.scope)
        form = await _form_of(request)
        if not await self._is_right(client_of(request.scope), form.get("password", "")):
            return self._form(form, "This is not the password, or it was tried too often: wait for a minute.", 401)
        goal = form.get("next", "")
        # A path of this page, and nothing that a browser takes for another host.
        is_ours = goal.startswith(f"{self._links.root_path}/") and not goal.startswith("//") and "\\" not in goal
        response = RedirectResponse(goal if is_ours else self._links.search(), 303)
        response.set_cookie(
            COOKIE,
            self._session(),
            max_age=SESSION_S,
            path=f"{self._links.root_path}/",
            secure=self._options.is_https,
            httponly=True,
            samesite="strict",
        )
        return response

    def _form(self, form: Mapping[str, str], said: str = "", status: int = 200, *, done: str = "") -> Response:
        values = {"said": said, "done": done, "next": form.get("next", "")}
        return self._rendering.page("login.html", values, status=status)

    def _ask(self, scope: Scope) -> Response:
        problem = Problem(401, "login_needed", "nobody is logged in", "Log in with the password, or ask by the proxy.")
        if scope["path"].startswith(FOR_PROGRAMS):
            headers = {"WWW-Authenticate": 'Basic realm="Relatum", charset="UTF-8"'}
            shown = headers if self._options.password_hash else {}
            return self._rendering.problem(Problem(401, problem.code, problem.message, problem.hint, shown), scope)
        if self._options.password_hash is None:
            refused = Problem(
                403, "not_named", "the proxy does not say who asks", "Come by the proxy, and log in there."
            )
            return self._rendering.problem(refused, scope)
        query = scope["query_string"].decode("latin-1")
        goal = f"{self._links.root_path}{scope['path']}{'?' if query else ''}{query}"
        return self._form({"next": goal[: _FORM_BYTES_MAX // 2]}, status=401)


def _password_of(kind: str, given: str) -> str | None:
    """The password that comes with a request: by HTTP Basic with any user, or as a token; None where there is none."""
    if kind == "bearer":
        return given
    if kind != "basic":
        return None
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return None


async def _form_of(request: Request) -> dict[str, str]:
    """The fields of a short form; none of one that is long, or takes long."""
    given = b""
    with anyio.move_on_after(_FORM_S) as patience:
        async for chunk in request.stream():
            given += chunk
            if len(given) > _FORM_BYTES_MAX:
                return {}
    if patience.cancelled_caught:
        return {}
    return {name: values[0] for name, values in parse_qs(given.decode("utf-8", "replace")).items()}
