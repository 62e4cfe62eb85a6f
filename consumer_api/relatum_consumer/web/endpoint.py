"""Endpoints: one declaration makes a page, a JSON document and a tool for agents, with their descriptions.

@endpoint("/collectors", "Collectors: messages by state.")
async def collectors(site: Site, query: NoParameters) -> CollectorsAnswer: ...
"""

import asyncio
import re
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
from relatum.membership import GROUP_KEY
from relatum_consumer.lookups.answer import first_few
from relatum_consumer.web.parameters import Parameters, Schemas, object_schema, parsed, schema_of, summary_of
from relatum_consumer.web.problems import GROUP_KEY_HINT, NARROW_HINT, Problem, problem_of
from relatum_consumer.web.rendering import Rendering
from relatum_consumer.web.site import ANSWER_S, Site

_Value = TypeVar("_Value")
_Function = TypeVar("_Function", bound=Callable[..., Coroutine[Any, Any, Any]])

Fact = tuple[str, str | None]
"""A sentence about what exists, shown on a page without an answer; and a link, or None."""

Form = dict[str, list[str]]
"""The values of a query's parameters, as the user sent them."""

Handler = Callable[[Request], Awaitable[Response]]

PATIENCE_S: Final = 3.0
"""Seconds that an answer or a page waits for an optional part, such as suggestions for its form."""

LIMIT_FACTOR: Final = 3.0
"""The time limit of an answer, as a multiple of a lookup's: some answers need several lookups."""

_NAMED_MAX: Final = 20
"""Maximum keys or streams that an error names."""

_STREAM_CHOICES_MAX: Final = 500
"""Maximum streams in the list of a form; users type other names."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint: its path, parameters and answer, and the function that computes the answer.

    Attributes:
        path: The page's path, and the JSON document's path below `/api`.
        summary: A description in one line.
        parameters: The model of the parameters.
        answer_type: The answer's dataclass.
        answer: Returns the answer. A `RelatumError` that it raises becomes a `Problem`.
        is_page: Whether there is also a page. Its template gets `query`, `answer` (or None), `problem`, `form`, `name`.
        tool: The name of the tool for agents; empty for none.
        is_submitted: Whether the parameters request an answer; if not, the page shows an empty form.
        start: Returns `start`, the content below an empty form.
        facts: Returns facts for a page without an answer: the target is missing, or a server is unavailable.
        empty: The code of a problem that means "not set up yet": the page has status 200 and shows the first step.
    """

    path: str
    summary: str
    parameters: type[Parameters]
    answer_type: type
    answer: Callable[[Site, Any], Coroutine[Any, Any, Any]]
    is_page: bool = True
    tool: str = ""
    is_submitted: Callable[[Any], bool] = lambda _: True
    start: Callable[[Site], Awaitable[Any]] | None = None
    facts: Callable[[Site, Any], Awaitable[tuple[Fact, ...]]] | None = None
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
        """The menu entry that the page marks as current."""
        return "streams" if self.path == "/stream" else self.path.split("/")[1]


ENDPOINTS: Final[list[Endpoint]] = []
"""All endpoints, in the order in which their modules are imported."""


def endpoint(path: str, summary: str, *, needs_keys: bool = True, **options: Any) -> Callable[[_Function], _Function]:
    """Declare a function as an `Endpoint`; its annotations name the parameters' model and the answer's dataclass.

    Each call first loads the masked keys, unless `needs_keys` is False: the answer then must not show values. Its time
    limit also ends the wait for calls that load the same, each of which has the same limit.
    """

    def declared(answer: _Function) -> _Function:
        async def answer_masked(site: Site, parameters: Any) -> Any:
            with within(LIMIT_FACTOR * site.options.timeout_s):
                await site.keys_last_known()
                return await answer(site, parameters)

        _, model, result = get_type_hints(answer).values()
        ENDPOINTS.append(Endpoint(path, summary, model, result, answer_masked if needs_keys else answer, **options))
        return answer

    return declared


# --- JSON and files ---------------------------------------------------------------------------------------


def document_of(endpoint: Endpoint, rendering: Rendering) -> Handler:
    """Return the handler that responds with the answer as JSON."""

    async def respond(site: Site, form: Form) -> Response:
        return rendering.json(document(await endpoint.answer(site, parsed(endpoint.parameters, form))))

    return handler_of(respond, rendering)


def handler_of(respond: Callable[[Site, Form], Awaitable[Response]], rendering: Rendering) -> Handler:
    """Return a handler that responds with the function's response, or with a problem as JSON or a page."""

    async def handle(request: Request) -> Response:
        site, started_at = request.app.state.site, time.monotonic()
        form = {name: request.query_params.getlist(name) for name in request.query_params}
        try:
            return await respond(site, form)
        except Exception as error:  # noqa: BLE001
            return rendering.problem(await diagnose(site, error, started_at), request.scope)

    return handle


# --- pages ------------------------------------------------------------------------------------------------


def page_of(endpoint: Endpoint, rendering: Rendering) -> Handler:
    """Return the handler of the page: the answer or the problem, and the form as the user filled it in."""

    async def respond(site: Site, form: Form) -> Response:
        query: Any = None
        answer = start = problem = None
        started_at = time.monotonic()
        limit_s = ANSWER_S if await site.unavailable() else None
        try:
            query = parsed(endpoint.parameters, form)
            with within(limit_s):
                if endpoint.is_submitted(query):
                    answer = await endpoint.answer(site, query)
                elif endpoint.start is not None:
                    start = await optional_part(endpoint.start(site))
        except Exception as error:  # noqa: BLE001
            problem = await diagnose(site, error, started_at)
        elapsed_s = time.monotonic() - started_at
        facts: tuple[Fact, ...] = ()
        shows_facts = problem is not None and (problem.status in (404, 410) or bool(site.servers.unavailable))
        if shows_facts and query is not None and endpoint.facts is not None:
            facts = await optional_part(endpoint.facts(site, query)) or ()
        keys = None if site.servers.database.error else await optional_part(site.keys())
        streams = None if keys is None else await optional_part(site.relations.streams())
        values = {
            "page": endpoint.menu,
            "form": form,
            "form_value": lambda name: form.get(name, [""])[0],
            "name": form.get("name" if "name" in endpoint.parameters.model_fields else "stream", [""])[0],
            "query": query,
            "answer": answer,
            "start": start,
            "problem": problem,
            "facts": facts,
            "elapsed_s": elapsed_s,
            # The page's own URL with changed parameters, and without the cursor unless one is passed.
            "same_page": lambda **changes: site.links.to(endpoint.page_path, **{**form, "cursor": None, **changes}),
            "are_keys_known": keys is not None,
            "key_choices": keys or (),
            "stream_choices": (streams or ())[:_STREAM_CHOICES_MAX],
            "site": site,
            "unavailable": await site.unavailable(),
        }
        failure = None if problem is not None and problem.code == endpoint.empty else problem
        return rendering.page(endpoint.template, values, failure)

    return handler_of(respond, rendering)


async def optional_part(awaitable: Awaitable[_Value]) -> _Value | None:
    """Return an optional part of an answer or a page; None if it fails or takes too long."""
    with within(PATIENCE_S), suppress(RelatumError):
        return await awaitable
    return None


async def gather(calls: Iterable[Callable[[], Awaitable[_Value]]], limit: int = 4) -> list[_Value]:
    """Await calls, at most `limit` concurrently; return the results in order. The first error cancels the others."""
    slots = asyncio.Semaphore(limit)

    async def result_of(call: Callable[[], Awaitable[_Value]]) -> _Value:
        async with slots:
            return await call()

    tasks = [asyncio.create_task(result_of(each)) for each in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


# --- errors -----------------------------------------------------------------------------------------------


async def diagnose(site: Site, error: Exception, started_at: float) -> Problem:
    """Return the problem for an error; a transient one names the unavailable server or the exceeded time limit."""
    problem, elapsed_s = problem_of(error), time.monotonic() - started_at
    if isinstance(error, KeyNotDefined | StreamNotFound):
        with suppress(RelatumError):
            return replace(problem, hint=await _names_hint(site, error))
    if not isinstance(error, Transient):
        return problem
    if unavailable := await site.unavailable():
        return replace(problem, message=f"the query needs {unavailable[0].name}, which does not answer")
    if isinstance(error, ReadTimeout) or elapsed_s >= site.options.timeout_s:
        limit_s = site.options.timeout_s * (LIMIT_FACTOR if elapsed_s >= LIMIT_FACTOR * site.options.timeout_s else 1)
        limit = f"the answer takes longer than its limit of {limit_s:g} s"
        return Problem(503, "took_too_long", limit, NARROW_HINT, problem.headers)
    return problem


async def _names_hint(site: Site, error: KeyNotDefined | StreamNotFound) -> str:
    """Return a hint with the existing names, similar ones first; for the group key, how to define it."""
    if isinstance(error, KeyNotDefined) and error.key == GROUP_KEY.name:
        return GROUP_KEY_HINT
    if isinstance(error, KeyNotDefined):
        title, none, missing = "Defined keys", "No key is defined.", error.key
        names = [each.name for each in await site.keys()]
    else:
        title, none, missing = "Recorded streams", "No stream is recorded.", error.stream
        # The missing stream may have been recorded and then deleted.
        names = [each for each in await site.relations.streams() if each != missing]
    if not names:
        return none
    sorted_names = list(dict.fromkeys([*get_close_matches(missing, names, _NAMED_MAX), *names]))
    return f"{title}: {first_few([*map(repr, sorted_names)], _NAMED_MAX)}."


def failure_text(site: Site, error: RelatumError) -> str:
    """Return why a part of an answer failed, in one line."""
    unavailable = site.servers.unavailable if isinstance(error, Transient) else ()
    return f"{unavailable[0].name} does not answer" if unavailable else problem_of(error).words


# --- OpenAPI ----------------------------------------------------------------------------------------------

_ERROR: Final = object_schema(
    {
        "error": object_schema(
            {name: {"type": "string"} for name in ("code", "message", "hint")},
            "A code for scripts, what failed, and what to do.",
        )
    },
    "Why there is no answer.",
)


def openapi(endpoints: Iterable[Endpoint], root_path: str, version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of `/api`, made from the endpoints' declarations."""
    schemas = Schemas(found={"Error": _ERROR})
    description = "What the page shows, as JSON. Read-only."
    return {
        "openapi": "3.1.0",
        "info": {"title": "Relatum", "version": version, "description": description},
        "servers": [{"url": f"{root_path}/api"}],
        "paths": {endpoint.path: {"get": _operation(endpoint, schemas)} for endpoint in endpoints},
        "components": {"schemas": schemas.found},
    }


def _operation(endpoint: Endpoint, schemas: Schemas) -> dict[str, Any]:
    def response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
        return {"description": description, "content": {"application/json": {"schema": schema}}}

    asked = schema_of(endpoint.parameters)
    return {
        "summary": endpoint.summary,
        "operationId": re.sub(r"\W+", "_", endpoint.path).strip("_"),
        "parameters": [
            {
                "name": name,
                "in": "query",
                "required": name in asked.get("required", ()),
                "description": schema["description"],
                "schema": schema,
            }
            for name, schema in asked["properties"].items()
        ],
        "responses": {
            "200": response(summary_of(endpoint.answer_type), schemas.of(endpoint.answer_type)),
            "default": response("There is no answer.", {"$ref": f"{schemas.at}Error"}),
        },
    }
