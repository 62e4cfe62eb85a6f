"""The tools by the protocol's SDK: over stdio, and over HTTP beside the page."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, Final

import anyio
from mcp import types
from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from starlette.types import ASGIApp

from relatum_consumer.web.links import Links
from relatum_consumer.web.options import WebOptions
from relatum_consumer.web.site import Site
from relatum_consumer.web.tool_calls import TOOLS_BY_NAME, Calls, schemas_of
from relatum_consumer.web.tools import INSTRUCTIONS, Tool

REQUEST_BYTES_MAX: Final = 256 << 10
"""Bytes of a request over HTTP."""


def server_of(calls: Calls) -> Server[Any]:
    """A server of the tools."""
    listed = types.ListToolsResult(tools=[_described(tool) for tool in TOOLS_BY_NAME.values()])

    async def list_tools(_: Any, __: Any) -> types.ListToolsResult:
        return listed

    async def call_tool(_: Any, asked: types.CallToolRequestParams) -> types.CallToolResult:
        tool = TOOLS_BY_NAME.get(asked.name)
        if tool is None:
            names = ", ".join(TOOLS_BY_NAME)
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {asked.name[:80]!r}; there are {names}")
        result = await calls.call(tool, asked.arguments or {})
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
    server = server_of(Calls(site))
    manager = StreamableHTTPSessionManager(server, stateless=True, max_request_body_size=REQUEST_BYTES_MAX)
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
    server = server_of(Calls(site))
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(site.tell_rights)
            async with stdio_server() as (reading, writing):
                await server.run(reading, writing, server.create_initialization_options())
            group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await site.close()
