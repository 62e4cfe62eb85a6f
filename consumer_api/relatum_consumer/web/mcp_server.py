"""The tools by the Model Context Protocol's SDK, over stdio and HTTP. Needs the extra `mcp`."""

import asyncio
import json
import math
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import version
from typing import Any, Final

import anyio
from mcp import types
from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from starlette.types import ASGIApp

from relatum import errors
from relatum.checks import seconds_text
from relatum.documents import document
from relatum_consumer.web.endpoint import problem_met
from relatum_consumer.web.links import Links
from relatum_consumer.web.options import WebOptions
from relatum_consumer.web.parameters import schema_of, values_given
from relatum_consumer.web.rendering import visible
from relatum_consumer.web.schemas import Schemas, object_schema
from relatum_consumer.web.site import Site
from relatum_consumer.web.tools import DATA, INSTRUCTIONS, TOOLS, Tool

_ANSWER_CHARACTERS_MAX: Final = 40_000
"""Characters of an answer: some 12,000 tokens, of the 25,000 that hosts take."""

_CHARACTERS, _ITEMS = 80, 8
"""Characters of a text, and items of a list, to which an answer is cut that is too long even with one message."""

_WHOLE: Final = frozenset({"next", "stream", "part"})
"""Texts that are of no use in part, or bounded by themselves."""

_NAMED_MAX: Final = 20
"""Keys or streams that an error offers."""

_PATIENCE: Final = 3.0
"""How many times as long as a look-up a whole call may take: some ask several times."""

_ERROR_CHARACTERS_MAX: Final = 8_000
"""Characters of an error: twenty names of streams, and some."""

_ITEMS_MAX: Final = 200
"""Items of a list of arguments."""

_REQUEST_BYTES_MAX: Final = 256 << 10
"""Bytes of a request over HTTP."""

_LESS: Final = "a narrower span of time, fewer streams, one key, a lower limit."

_HINTS: Final[tuple[tuple[type[errors.RelatumError], str], ...]] = (
    (errors.NothingRecorded, "Somebody has to run a recorder: relatum record STREAM."),
    (errors.OffsetNotFound, "Offsets have gaps: the tool `streams` tells a stream's first and last."),
    (errors.AccessRefused, "The user that this server asks as may not read it; who set it up can allow it."),
    (errors.ConfigurationError, "Somebody has to change how this server, or the recorder, is set up."),
    (errors.Transient, "Try again in a moment; if it stays so, tell the person you work for."),
)
"""Hints for agents, where they differ from those of the page."""

_TOOLS_BY_NAME: Final = {each.name: each for each in TOOLS}


def _server_of(site: Site) -> Server[Any]:
    """A server of the tools."""
    listed = types.ListToolsResult(tools=[_described(tool) for tool in TOOLS])

    async def list_tools(_: Any, __: Any) -> types.ListToolsResult:
        return listed

    async def call_tool(_: Any, asked: types.CallToolRequestParams) -> types.CallToolResult:
        tool = _TOOLS_BY_NAME.get(asked.name)
        if tool is None:
            names = ", ".join(_TOOLS_BY_NAME)
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {asked.name[:80]!r}; there are {names}")
        text, structured = await _called(site, tool, asked.arguments or {})
        content: list[types.ContentBlock] = [types.TextContent(type="text", text=text)]
        return types.CallToolResult(content=content, structured_content=structured, is_error=structured is None)

    return Server(
        "relatum",
        version=version("relatum"),
        title="Relatum",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _described(tool: Tool) -> types.Tool:
    schemas = Schemas("#/$defs/")
    answer = {
        "notice": {"type": "string", "description": "How the answer is to be taken."},
        "go_on": {"type": "string", "description": "How to have the rest; empty where this is all."},
        "answer": schemas.of(tool.gives),
    }
    given = {each.name: schema_of(each) | {"description": each.parameter.description} for each in tool.fields}
    required = [each.name for each in tool.fields if each.is_required]
    return types.Tool(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=object_schema(given, "") | {"required": required},
        output_schema=object_schema(answer, "") | {"$defs": schemas.found},
        # What it gives was written by whoever publishes: the world that it looks at is open.
        annotations=types.ToolAnnotations(
            title=tool.title, read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=True
        ),
    )


@asynccontextmanager
async def over_http(site: Site) -> AsyncIterator[ASGIApp]:
    """The tools as an application, for as long as the page runs. No sessions are kept: a request is all there is."""
    manager = StreamableHTTPSessionManager(_server_of(site), stateless=True, max_request_body_size=_REQUEST_BYTES_MAX)
    async with manager.run():
        yield manager.asgi_app


async def over_stdio(options: WebOptions) -> None:
    """Serve the tools over stdin and stdout until stdin ends, or SIGTERM or SIGINT comes.

    Raises:
        ConfigurationError: the broker's or the database's URL is none.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        # A thread that waits for stdin is ended by nothing else; what only reads leaves nothing behind.
        asyncio.get_running_loop().add_signal_handler(number, os._exit, 0)
    site = Site(options, Links())
    server = _server_of(site)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(site.tell_rights)
            async with stdio_server() as (reading, writing):
                await server.run(reading, writing, server.create_initialization_options())
            group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await site.close()


# --- a call -----------------------------------------------------------------------------------------------


async def _called(site: Site, tool: Tool, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """A tool's answer as text and as JSON; of an error its words, and None."""
    patience_s = _PATIENCE * site.options.timeout_s
    try:
        with anyio.fail_after(patience_s):
            structured = await _answered(site, tool, _asked(tool, arguments))
            return _text_of(structured), structured
    except TimeoutError:
        return f"took_too_long: no answer within {seconds_text(patience_s)}. Ask for less: {_LESS}", None
    except Exception as error:  # noqa: BLE001
        words = _visible(await _words(site, error))
        return words if len(words) <= _ERROR_CHARACTERS_MAX else f"{words[: _ERROR_CHARACTERS_MAX - 1]}…", None


def _asked(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    """The question that a call's arguments ask: they are read as a query is.

    Raises:
        InvalidInput: one is wrong, missing, or not known.
    """
    pairs = []
    for name, value in arguments.items():
        items = value if isinstance(value, list) else [value]
        if len(items) > _ITEMS_MAX:
            raise errors.InvalidInput(f"{name} has more than {_ITEMS_MAX} items")
        pairs += [(name, _argument(name, each)) for each in items if each is not None]
    values = values_given(tool.fields, pairs)
    for each in tool.fields:
        if each.is_required and values[each.name] in ("", ()):
            raise errors.InvalidInput(f"{each.name} is missing: {each.parameter.description}")
    if tool.limit is not None:
        values.setdefault("limit", tool.limit[0])
    return tool.asked(**values)


def _argument(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict | list):
        raise errors.InvalidInput(f"{name} is a text or a number, or a list of them")
    if isinstance(value, float) and not math.isfinite(value):
        raise errors.InvalidInput(f"{name} is no number of JSON, or too large a one: give it as a text")
    # As JSON writes it: true, 42, and 42 for 42.0.
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


async def _answered(site: Site, tool: Tool, asked: Any) -> dict[str, Any]:
    """A tool's answer, of as many messages as fit, and where one is too long, cut."""
    answer = await tool.answer(site, asked)
    shown, cut = document(answer, _visible), ""
    limit = wanted = getattr(asked, "limit", 1)
    while (length := len(_text_of(shown))) > _ANSWER_CHARACTERS_MAX and limit > 1:
        limit = max(1, min(limit // 2, int(0.8 * limit * _ANSWER_CHARACTERS_MAX / length)))
        answer = await tool.answer(site, replace(asked, limit=limit))
        shown = document(answer, _visible)
        cut = f"With limit={wanted} this was too long: it is cut to limit={limit}. "
    if length > _ANSWER_CHARACTERS_MAX:
        shown = _cut(shown)
        cut += f"This was too long: texts were cut to {_CHARACTERS} characters, and lists to {_ITEMS}. "
    return {"notice": DATA, "go_on": _visible(cut + tool.go_on(answer)), "answer": shown}


def _cut(value: Any, name: str = "") -> Any:
    if isinstance(value, str):
        return value if name in _WHOLE or len(value) <= _CHARACTERS else f"{value[: _CHARACTERS - 1]}…"
    if isinstance(value, list):
        return [_cut(each) for each in value[:_ITEMS]]
    if isinstance(value, Mapping):
        return {each: _cut(inner, each) for each, inner in value.items()}
    return value


async def _words(site: Site, error: Exception) -> str:
    """An error, and what to do next."""
    problem = problem_met(error)
    if problem.status == 500 and not isinstance(error, errors.RelatumError):
        return "unexpected: Relatum failed. The server's log has the traceback: tell the person you work for."
    hint = next((hint for kind, hint in _HINTS if isinstance(error, kind)), problem.hint)
    with suppress(errors.RelatumError):
        if isinstance(error, errors.KeyNotDefined):
            names = [each.name for each in await site.keys()]
            hint = _offered("Keys that are defined", names, error.key) if names else "No key is defined."
        elif isinstance(error, errors.StreamNotFound):
            names = list(await site.relations.streams())
            hint = _offered("Streams that are recorded", names, error.stream) if names else "No stream is recorded."
    return f"{problem.code}: {problem.message.rstrip('.')}. {hint}"


def _offered(what: str, names: list[str], meant: str) -> str:
    """Names that there are, those first that are like the one that was meant."""
    alike = get_close_matches(meant, names, _NAMED_MAX)
    offered = list(dict.fromkeys([*alike, *names]))
    more = f" and {len(offered) - _NAMED_MAX:,} more" if len(offered) > _NAMED_MAX else ""
    return f"{what}: {', '.join(map(repr, offered[:_NAMED_MAX]))}{more}."


def _visible(text: str) -> str:
    """Text of others with invisible characters as their numbers; lines stay."""
    lines = (map(visible, line.split("\t")) for line in text.split("\n"))
    return text if text.isprintable() else "\n".join(map("\t".join, lines))


def _text_of(value: Any) -> str:
    """JSON in a line."""
    return json.dumps(value, ensure_ascii=False)
