"""Endpoints: each is declared once, and becomes a page, a JSON document and an agent's tool, with descriptions.

@endpoint("/collectors", "Collectors: messages by state.")
async def collectors(site: Site, asked: NoParameters) -> CollectorsAnswer: ...
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final, TypeVar, get_type_hints

from starlette.requests import Request
from starlette.responses import Response

from relatum.common.documents import document
from relatum.common.waiting import within
from relatum.errors import KeyNotDefined, ReadTimeout, RelatumError, StreamNotFound, Transient
from relatum_consumer.lookups.answer import first_few
from relatum_consumer.web.parameters import Parameters, parsed
from relatum_consumer.web.problems import DEFINE_GROUPS, LESS, Problem, problem_of
from relatum_consumer.web.rendering import Rendering
from relatum_consumer.web.site import ANSWER_S, Site

_Value = TypeVar("_Value")
_Answering = TypeVar("_Answering", bound=Callable[..., Coroutine[Any, Any, Any]])

Known = tuple[str, str | None]
"""A fact that is known while one server is unavailable, in words; and a link, or None."""

Handler = Callable[[Request], Awaitable[Response]]

PATIENCE_S: Final = 3.0
"""How long an answer or a page waits for an optional part, such as suggestions for its form, in seconds."""

_NAMED_MAX: Final = 20
"""The most keys or streams that an error names."""

_OFFERED_MAX: Final = 500
"""The most streams offered in a list; users type the names of others."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint's parameters, its answer, and the function between them.

    Attributes:
        path: The path below `/api`, and of the page.
        summary: A description in one line.
        asked: The model of the parameters.
        gives: The answer's dataclass.
        answer: The function that answers. A `RelatumError` that it raises becomes a `Problem`.
        is_page: Whether it is also a page. Its template gets `asked`, `answer` (or None), `problem` and `typed`.
        tool: The name of the tool for agents; empty for none.
        is_asked: Whether the parameters ask for an answer; if not, the page shows an empty form.
        unasked: Returns `start`, the first content of a page with an empty form.
        known: Returns the known facts for a page whose answer is missing or needs an unavailable server.
        empty: The code of a problem for which the page is served with status 200: the template shows the first step.
    """

    path: str
    summary: str
    asked: type[Parameters]
    gives: type
    answer: Callable[[Site, Any], Coroutine[Any, Any, Any]]
    is_page: bool = True
    tool: str = ""
    is_asked: Callable[[Any], bool] = lambda _: True
    unasked: Callable[[Site], Awaitable[Any]] | None = None
    known: Callable[[Site, Any], Awaitable[tuple[Known, ...]]] | None = None
    empty: str = ""

    @property
    def page_path(self) -> str:
        """The path of the page; the search is at `/`."""
        return "/" if self.path == "/search" else self.path

    @property
    def template(self) -> str:
        """The page's template, named as the last part of the path."""
        return f"{self.path.rpartition('/')[2].replace('-', '_')}.html"

    @property
    def menu(self) -> str:
        """The name that the page's menu marks."""
        return "streams" if self.path == "/stream" else self.path.split("/")[1]


ENDPOINTS: Final[list[Endpoint]] = []
"""All endpoints, in the order in which their modules are imported."""


def endpoint(path: str, summary: str, *, needs_keys: bool = True, **options: Any) -> Callable[[_Answering], _Answering]:
    """Declare a function as an `Endpoint`; its annotations name the parameters' model and the answer's dataclass.

    It is called once the page knows which keys are masked, unless it shows nothing that may be (`needs_keys`).
    """

    def declared(answer: _Answering) -> _Answering:
        async def answer_masked(site: Site, parameters: Any) -> Any:
            await site.keys_last_known()
            return await answer(site, parameters)

        _, asked, gives = get_type_hints(answer).values()
        ENDPOINTS.append(Endpoint(path, summary, asked, gives, answer_masked if needs_keys else answer, **options))
        return answer

    return declared


# --- JSON and files ---------------------------------------------------------------------------------------


def document_of(endpoint: Endpoint, rendering: Rendering) -> Handler:
    """Return the handler that responds with the answer as JSON."""

    async def respond(site: Site, asked: Any) -> Response:
        return rendering.json(document(await endpoint.answer(site, asked)))

    return given_out(endpoint.asked, respond, rendering)


def given_out(
    kind: type[Parameters], respond: Callable[[Site, Any], Awaitable[Response]], rendering: Rendering
) -> Handler:
    """Return a handler that responds with a function's response, or with the problem as JSON or a page."""

    async def handle(request: Request) -> Response:
        site, began = request.app.state.site, time.monotonic()
        try:
            return await respond(site, parsed(kind, _typed(request)))
        except Exception as error:  # noqa: BLE001
            return rendering.problem(await why(site, error, began), request.scope)

    return handle


def _typed(request: Request) -> dict[str, list[str]]:
    return {name: request.query_params.getlist(name) for name in request.query_params}


# --- pages ------------------------------------------------------------------------------------------------


def page_of(endpoint: Endpoint, rendering: Rendering) -> Handler:
    """Return the handler that responds with the page: the answer, or the problem, and the form as filled in."""

    async def handle(request: Request) -> Response:
        site: Site = request.app.state.site
        typed = _typed(request)
        asked: Any = None
        answer = start = problem = None
        began = time.monotonic()
        # While a server is unavailable, an answer that needs it times out sooner.
        limit_s = ANSWER_S if await site.away() else None
        try:
            asked = parsed(endpoint.asked, typed)
            with within(limit_s):
                if endpoint.is_asked(asked):
                    answer = await endpoint.answer(site, asked)
                elif endpoint.unasked is not None:
                    start = await in_patience(endpoint.unasked(site))
        except Exception as error:  # noqa: BLE001
            problem = await why(site, error, began)
        took_s = time.monotonic() - began
        known: tuple[Known, ...] = ()
        is_known = problem is not None and (problem.status in (404, 410) or bool(site.servers.away))
        if is_known and asked is not None and endpoint.known is not None:
            known = await in_patience(endpoint.known(site, asked)) or ()
        keys = None if site.servers.database.error else await in_patience(site.keys())
        streams = None if keys is None else await in_patience(site.relations.streams())
        values = {
            "page": endpoint.menu,
            "typed": typed,
            "given": lambda name: typed.get(name, [""])[0],
            "asked": asked,
            "answer": answer,
            "start": start,
            "problem": problem,
            "known": known,
            "took_s": took_s,
            # The page's URL with some parameters changed; it leads to the first page unless `cursor` is given.
            "again": lambda **changes: site.links.to(endpoint.page_path, **{**typed, "cursor": None, **changes}),
            "are_keys_known": keys is not None,
            "offered_keys": keys or (),
            "offered_streams": (streams or ())[:_OFFERED_MAX],
            "site": site,
            "away": await site.away(),
        }
        is_well = problem is None or problem.code == endpoint.empty
        status, headers = (200, {}) if is_well or problem is None else (problem.status, problem.headers)
        try:
            return rendering.page(endpoint.template, values, status=status, headers=headers)
        except Exception as error:  # noqa: BLE001
            return rendering.problem(problem_of(error), request.scope)

    return handle


async def in_patience(asked: Awaitable[_Value]) -> _Value | None:
    """Return an optional part of an answer or a page; None if it fails or takes too long."""
    with within(PATIENCE_S), suppress(RelatumError):
        return await asked
    return None


async def gathered(questions: Iterable[Callable[[], Awaitable[_Value]]], at_once: int = 4) -> list[_Value]:
    """Await calls concurrently, and return the results in order. The first error cancels the others and is raised."""
    free = asyncio.Semaphore(at_once)

    async def answer(question: Callable[[], Awaitable[_Value]]) -> _Value:
        async with free:
            return await question()

    tasks = [asyncio.create_task(answer(each)) for each in questions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


# --- what went wrong --------------------------------------------------------------------------------------


async def why(site: Site, error: Exception, began: float) -> Problem:
    """Return the problem: it names the unavailable server if there is one, else the time limit if it was exceeded."""
    problem, took_s = problem_of(error), time.monotonic() - began
    if isinstance(error, KeyNotDefined | StreamNotFound) and problem.hint != DEFINE_GROUPS:
        with suppress(RelatumError):
            return replace(problem, hint=await _offered(site, error))
    if not isinstance(error, Transient):
        return problem
    if away := await site.away():
        return replace(problem, message=f"this needs {away[0].name}, which does not answer")
    if isinstance(error, ReadTimeout) or took_s >= site.options.timeout_s:
        limit = f"the answer takes longer than its limit of {site.options.timeout_s:g} s"
        return Problem(503, "took_too_long", limit, LESS, problem.headers)
    return problem


async def _offered(site: Site, error: KeyNotDefined | StreamNotFound) -> str:
    """Return a hint with the existing names, similar ones first."""
    if isinstance(error, KeyNotDefined):
        what, none, meant = "Defined keys", "No key is defined.", error.key
        names = [each.name for each in await site.keys()]
    else:
        what, none, meant = "Recorded streams", "No stream is recorded.", error.stream
        # The missing stream itself may have been recorded, and then deleted.
        names = [each for each in await site.relations.streams() if each != meant]
    if not names:
        return none
    offered = list(dict.fromkeys([*get_close_matches(meant, names, _NAMED_MAX), *names]))
    return f"{what}: {first_few([*map(repr, offered)], _NAMED_MAX)}."


def words_of(site: Site, error: RelatumError) -> str:
    """Return one line that says why a part of an answer failed."""
    away = site.servers.away
    return f"{away[0].name} does not answer" if away and isinstance(error, Transient) else problem_of(error).words
