"""A page, and the same as JSON: declared once, from which routes, answers and the description in OpenAPI are made.

@endpoint("/collectors", "Collectors: messages by state.", template="collectors.html", page="collectors")
async def collectors(site: Site, asked: CollectorsAsked) -> CollectorsAnswer: ...
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar, get_type_hints

import anyio
from starlette.requests import Request
from starlette.responses import Response

from relatum.errors import ReadTimeout, RelatumError, Transient
from relatum.waiting import within
from relatum_consumer.web.documents import document
from relatum_consumer.web.parameters import parsed
from relatum_consumer.web.problems import Problem, Refused, problem_of
from relatum_consumer.web.rendering import Rendering
from relatum_consumer.web.servers import ANSWER_S
from relatum_consumer.web.site import Site

log = logging.getLogger(__name__)

_Value = TypeVar("_Value")
_Answering = TypeVar("_Answering", bound=Callable[..., Awaitable[Any]])

_FAULT: Final = Problem(
    500, "unexpected", "the page met what nobody foresaw", "Its log has the traceback: please tell who runs it."
)


_NARROWER: Final = "Ask for less: a shorter span of time, fewer streams."

Known = tuple[str, str | None]
"""What is known although one server is away, in words; and a link, or None."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What can be asked, and who answers.

    Attributes:
        path: Below `/api`, and of the page.
        summary: In a line.
        asked: A dataclass of `Parameter`s.
        gives: The answer's dataclass.
        answer: The function between. What it raises of Relatum's errors becomes a problem.
        template: The page's template, which is given `asked`, `answer` (None where there is none), `problem` and
            `typed`; None where there is no page, or it is another endpoint's.
        page: The page's name, for what it marks in its menu.
        is_asked: Whether there is anything to answer: a form that nobody filled in is a page, too.
        unasked: What such a page is given as `start`, to begin with.
        beside: What a page with an answer is given as `beside`, asked at the same time; None where it takes too long.
        known: What one server alone knows, for a page whose answer needs the one that is away.
        narrower: What to ask for instead of what takes too long.
        files: Files of the same, by the last part of their paths.
        empty: The code of a problem that is no problem of a page: its template shows what to do first.
    """

    path: str
    summary: str
    asked: type
    gives: type
    answer: Callable[[Site, Any], Awaitable[Any]]
    template: str | None = None
    page: str = ""
    is_asked: Callable[[Any], bool] = lambda _: True
    unasked: Callable[[Site], Awaitable[Any]] | None = None
    beside: Callable[[Site, Any], Awaitable[Any]] | None = None
    known: Callable[[Site, Any], Awaitable[tuple[Known, ...]]] | None = None
    narrower: str = _NARROWER
    files: Mapping[str, Callable[[Site, Any], Awaitable[Response]]] = field(default_factory=dict)
    empty: str = ""

    @property
    def page_path(self) -> str:
        """Where the page is: the search is the first one."""
        return "/" if self.path == "/search" else self.path


Handler = Callable[[Request], Awaitable[Response]]

ENDPOINTS: Final[list[Endpoint]] = []
"""All of them, as the modules that declare them are imported."""


def endpoint(path: str, summary: str, **options: Any) -> Callable[[_Answering], _Answering]:
    """Declares a function as an endpoint: what it is asked and gives is said by its annotations.

    Args:
        path: As of `Endpoint`.
        summary: As of `Endpoint`.
        options: Others of `Endpoint`.
    """

    def declared(answer: _Answering) -> _Answering:
        _, asked, gives = get_type_hints(answer).values()
        ENDPOINTS.append(Endpoint(path, summary, asked, gives, answer, **options))
        return answer

    return declared


def document_of(endpoint: Endpoint, rendering: Rendering) -> Handler:
    """What answers with JSON."""

    async def handle(request: Request) -> Response:
        site, began = request.app.state.site, time.monotonic()
        try:
            asked: Any = parsed(endpoint.asked, request.query_params.multi_items())
            answer = document(await endpoint.answer(site, asked))
        except Exception as error:  # noqa: BLE001
            return rendering.problem(await _why(endpoint, site, error, began), request.scope)
        return rendering.json(answer)

    return handle


_ALONE: Final = "sandbox; default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
"""Also where it is opened by itself: an origin of its own, nothing is loaded or run. Styles are the browser's own."""


def file_of(content: bytes, media_type: str, name: str = "") -> Response:
    """What others wrote, given out so that no browser runs any of it; with a name, to be kept."""
    headers = {"Content-Security-Policy": _ALONE}
    if name:
        headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return Response(content, headers=headers | {"Content-Type": media_type})


def given_out(endpoint: Endpoint, give: Callable[[Site, Any], Awaitable[Response]], rendering: Rendering) -> Handler:
    """What answers with a file."""

    async def handle(request: Request) -> Response:
        try:
            asked: Any = parsed(endpoint.asked, request.query_params.multi_items())
            return await give(request.app.state.site, asked)
        except Exception as error:  # noqa: BLE001
            return rendering.problem(problem_met(error), request.scope)

    return handle


def page_of(endpoint: Endpoint, rendering: Rendering) -> Handler:
    """What answers with the page: with the answer in it, or with what went wrong and what was typed."""
    assert endpoint.template is not None, "it is a page"
    template = endpoint.template

    async def handle(request: Request) -> Response:
        site: Site = request.app.state.site
        query = request.query_params.multi_items()
        values: dict[str, Any] = {
            "page": endpoint.page,
            "asked": None,
            "answer": None,
            "start": None,
            "beside": None,
            "known": (),
            "next_href": None,
            "typed": _typed(query),
        }
        problem, began = None, time.monotonic()
        # What needs a server that is away is not waited for as long as an answer may take.
        limit_s = ANSWER_S if await site.away() else None
        try:
            asked: Any = parsed(endpoint.asked, query)
            values["asked"] = asked
            with within(limit_s):
                if endpoint.is_asked(asked):
                    values["answer"], values["beside"] = await answered(endpoint, site, asked)
                elif endpoint.unasked is not None:
                    values["start"] = await _in_patience(endpoint.unasked(site))
        except Exception as error:  # noqa: BLE001
            problem = await _why(endpoint, site, error, began)
        if cursor := getattr(values["answer"], "next", None):
            values["next_href"] = site.links.asked(endpoint.page_path, replace(asked, cursor=cursor))
        values["took_ms"] = round(1e3 * (time.monotonic() - began))
        if problem is not None and site.servers.away and endpoint.known is not None:
            values["known"] = await _in_patience(endpoint.known(site, asked)) or ()
        values |= {"problem": problem, **(await _offered(site))}
        values |= {"servers": site.servers, "away": await site.away()}
        is_well = problem is None or problem.code == endpoint.empty
        status, headers = (200, {}) if is_well or problem is None else (problem.status, problem.headers)
        try:
            return rendering.page(template, values, status=status, headers=headers)
        except Exception as error:  # noqa: BLE001
            return rendering.problem(problem_met(error), request.scope)

    return handle


async def answered(endpoint: Endpoint, site: Site, asked: Any) -> tuple[Any, Any]:
    """The answer, and what is beside it: that is waited for `BESIDE_S` after it at most, and not where it fails."""
    if endpoint.beside is None:
        return await endpoint.answer(site, asked), None
    look, beside, failed, answer = endpoint.beside, None, None, None
    is_over = anyio.Event()

    async def look_beside() -> None:
        nonlocal beside
        with suppress(RelatumError):
            beside = await look(site, asked)
        is_over.set()

    async with anyio.create_task_group() as group:
        group.start_soon(look_beside)
        try:
            answer = await endpoint.answer(site, asked)
            with anyio.move_on_after(BESIDE_S):
                await is_over.wait()
        except Exception as error:  # noqa: BLE001
            # A group would raise it as one of several.
            failed = error
        group.cancel_scope.cancel()
    if failed is not None:
        raise failed
    return answer, beside


def met(error: Exception) -> Exception:
    """Of errors that tasks side by side ended with, the first that says what went wrong."""
    while isinstance(error, ExceptionGroup):
        error = next((each for each in error.exceptions if isinstance(each, RelatumError)), error.exceptions[0])
    return error


def problem_met(error: Exception) -> Problem:
    """What went wrong, for who asked; a fault of ours is told to the log."""
    error = met(error)
    if isinstance(error, Refused):
        return error.problem
    if isinstance(error, RelatumError):
        problem = problem_of(error)
        if problem.status < 500 or problem.is_passing:
            return problem
    log.exception("a page failed", exc_info=error)
    return problem_of(error) if isinstance(error, RelatumError) else _FAULT


async def _why(endpoint: Endpoint, site: Site, error: Exception, began: float) -> Problem:
    """What went wrong: the server that is away, where one is; and where both answer, that it took too long."""
    problem, first, took_s = problem_met(error), met(error), time.monotonic() - began
    if not isinstance(first, Transient):
        return problem
    away = await site.away()
    if away:
        return replace(problem, message=f"this needs {away[0].name}, which does not answer")
    if isinstance(first, ReadTimeout) or took_s >= site.options.timeout_s:
        limit = f"this takes longer than the {site.options.timeout_s:g} s that an answer may take"
        return Problem(503, "took_too_long", limit, endpoint.narrower, problem.headers)
    return problem


def words_of(site: Site, error: RelatumError) -> str:
    """The same in a line, of a part of an answer."""
    away = site.servers.away
    return f"{away[0].name} does not answer" if away and isinstance(error, Transient) else problem_met(error).words


def _typed(query: list[tuple[str, str]]) -> Mapping[str, list[str]]:
    """What was typed, as it was typed: shown again in the form where it was wrong."""
    typed: dict[str, list[str]] = {}
    for name, value in query:
        typed.setdefault(name, []).append(value)
    return typed


async def _offered(site: Site) -> dict[str, Any]:
    """The keys and streams that a form offers while something is typed; and whether anybody could say."""
    keys = None if site.servers.database.error else await _in_patience(site.keys())
    streams = None if keys is None else await _in_patience(site.relations.streams())
    return {
        "are_keys_known": keys is not None,
        "offered_keys": keys or (),
        "offered_streams": (streams or ())[:_OFFERED_MAX],
    }


async def _in_patience(asked: Awaitable[_Value]) -> _Value | None:
    """What a page can do without; None where nobody can say in time."""
    with within(PATIENCE_S), suppress(RelatumError):
        return await asked
    return None


PATIENCE_S: Final = 3.0
"""Seconds that a page waits for what it can do without: what can be typed in does not hang on it."""

BESIDE_S: Final = 0.5
"""Seconds that an answer, once it is there, waits for what is shown beside it."""

_OFFERED_MAX: Final = 500
"""Streams offered in a list; of others the name is typed."""
