"""The tools by the protocol's SDK, which `_unreadable` imports, too: over stdio, and over HTTP beside the page."""

import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, Final

import anyio
from mcp import types
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from starlette.types import ASGIApp

from relatum_consumer.web._links import Links
from relatum_consumer.web._mcp._calls import TOOLS_BY_NAME, Calls, schemas_of
from relatum_consumer.web._mcp._given_up import SESSION, GivenUp
from relatum_consumer.web._mcp._tools import INSTRUCTIONS, Tool
from relatum_consumer.web._mcp._unreadable import REQUEST_BYTES_MAX, pass_on, shortened_lines
from relatum_consumer.web._options import WebOptions
from relatum_consumer.web._site import Site

_GIVEN_UP: Final = -32_800
"""The code that the SDK answers with where a call was given up; the Language Server Protocol's."""


def server_of(calls: Calls, given_up: GivenUp) -> Server[Any]:
    """A server of the tools."""
    listed = types.ListToolsResult(tools=[_described(tool) for tool in TOOLS_BY_NAME.values()])

    async def list_tools(_: Any, __: Any) -> types.ListToolsResult:
        return listed

    async def call_tool(context: ServerRequestContext[Any], asked: types.CallToolRequestParams) -> types.CallToolResult:
        tool, arguments = TOOLS_BY_NAME.get(asked.name), asked.arguments or {}
        if tool is None:
            names = ", ".join(TOOLS_BY_NAME)
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {asked.name[:80]!r}; there are {names}")
        result = None
        request: Any = context.request
        with given_up.call(request and request.headers.get(SESSION), context.request_id):
            result = await calls.call(tool, arguments)
        if result is None:
            raise MCPError(_GIVEN_UP, "it was given up")
        content: list[types.ContentBlock] = [types.TextContent(type="text", text=result.text)]
        return types.CallToolResult(
            content=content, structured_content=result.structured, is_error=result.structured is None
        )

    return Server(
        "relatum",
        version=version("relatum"),
        title="Relatum",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _described(tool: Tool) -> types.Tool:
    takes, gives = schemas_of(tool)
    # What it gives was written by whoever publishes: the world that it looks at is open.
    hints = types.ToolAnnotations(
        title=tool.title, read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=True
    )
    return types.Tool(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=takes,
        output_schema=gives,
        annotations=hints,
    )


@asynccontextmanager
async def over_http(site: Site) -> AsyncIterator[ASGIApp]:
    """The tools as an application, for as long as the page runs. No sessions are kept: a request is all there is."""
    given_up = GivenUp()
    manager = StreamableHTTPSessionManager(
        server_of(Calls(site), given_up), stateless=True, max_request_body_size=REQUEST_BYTES_MAX
    )
    async with manager.run():
        yield given_up.listening(manager.asgi_app)


async def over_stdio(options: WebOptions) -> None:
    """Serve the tools over stdin and stdout until one of them ends, or SIGTERM or SIGINT comes.

    Raises:
        ConfigurationError: the broker's or the database's URL is none.
    """
    site = Site(options, Links())
    server = server_of(Calls(site), GivenUp())
    stdout = _watched()
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_end_by_signal, site)
            if stdout is not None:
                group.start_soon(_end_with_reader, site, stdout)
            group.start_soon(site.tell_rights)
            async with stdio_server(shortened_lines(sys.stdin.buffer)) as (reading, writing):
                onward, requests = anyio.create_memory_object_stream[SessionMessage | Exception]()
                group.start_soon(pass_on, reading, onward, writing.send)
                await server.run(requests, writing, server.create_initialization_options())
            group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await site.close()


async def _end_by_signal(site: Site) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            await _end(site)


def _watched() -> int | None:
    """Another number for stdout, whose own the SDK takes; None where it has no reader that could go.

    A file has none, and on one socket for both, as inetd gives it, requests come.
    """
    given = os.fstat(1)
    has_reader = stat.S_ISFIFO(given.st_mode) or stat.S_ISSOCK(given.st_mode)
    return os.dup(1) if has_reader and not os.path.samestat(given, os.fstat(0)) else None


async def _end_with_reader(site: Site, stdout: int) -> None:
    """End the process once nobody reads its answers any more, though its stdin may be held open."""
    await anyio.wait_readable(stdout)  # Nothing comes by it but its end.
    await _end(site)


async def _end(site: Site) -> None:
    """End the process: a thread that waits for stdin is ended by nothing else."""
    with anyio.move_on_after(site.options.drain_s):
        await site.close()
    sys.stderr.flush()
    os._exit(0)
