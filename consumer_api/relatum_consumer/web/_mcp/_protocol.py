"""The tools by the protocol's SDK: over stdio, and over HTTP beside the page. The one module that imports the SDK."""

import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Final

import anyio
from mcp import types
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from starlette.types import ASGIApp

from relatum_consumer.web._audit import AuditLog
from relatum_consumer.web._links import Links
from relatum_consumer.web._mcp._calls import TOOLS_BY_NAME, Calls, schemas_of
from relatum_consumer.web._mcp._tools import INSTRUCTIONS, Tool
from relatum_consumer.web._options import WebOptions
from relatum_consumer.web._site import Site

REQUEST_BYTES_MAX: Final = 256 << 10
"""Bytes of a request."""


def server_of(calls: Calls, audit: AuditLog | None = None) -> Server[Any]:
    """A server of the tools.

    `audit`: Where calls are written down, if nobody else does: over HTTP the page's audit does.
    """
    listed = types.ListToolsResult(tools=[_described(tool) for tool in TOOLS_BY_NAME.values()])

    async def list_tools(_: Any, __: Any) -> types.ListToolsResult:
        return listed

    async def call_tool(context: ServerRequestContext[Any], asked: types.CallToolRequestParams) -> types.CallToolResult:
        tool, arguments = TOOLS_BY_NAME.get(asked.name), asked.arguments or {}
        if tool is None:
            names = ", ".join(TOOLS_BY_NAME)
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {asked.name[:80]!r}; there are {names}")
        began, status, messages = time.perf_counter(), 499, 0
        try:
            result = await calls.call(tool, arguments)
            status, messages = 400 if result.structured is None else 200, result.messages
        finally:
            query = calls.told(tool.name, arguments)
            if audit is not None:
                audit.write(_line(query, status, messages, began))
            elif context.request is not None:
                context.request.state.asked, context.request.state.messages = query, messages
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


def _line(query: str, status: int, messages: int, began: float) -> dict[str, Any]:
    """A line of the audit log, as a request by HTTP has one."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "who": "-",
        "client": "stdio",
        "method": "POST",
        "path": "/mcp",
        "query": query,
        "status": status,
        "messages": messages,
        "ms": round(1e3 * (time.perf_counter() - began), 1),
    }


@asynccontextmanager
async def over_http(site: Site) -> AsyncIterator[ASGIApp]:
    """The tools as an application, for as long as the page runs. No sessions are kept: a request is all there is."""
    manager = StreamableHTTPSessionManager(
        server_of(Calls(site)), stateless=True, max_request_body_size=REQUEST_BYTES_MAX
    )
    async with manager.run():
        yield manager.asgi_app


async def over_stdio(options: WebOptions) -> None:
    """Serve the tools over stdin and stdout until stdin ends, or SIGTERM or SIGINT comes.

    Raises:
        ConfigurationError: the broker's or the database's URL is none.
    """
    site = Site(options, Links())
    server = server_of(Calls(site, options.requests_at_once), AuditLog(options.audit_path))
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_end_by_signal, site)
            group.start_soon(site.tell_rights)
            async with stdio_server() as (reading, writing):
                await server.run(reading, writing, server.create_initialization_options())
            group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await site.close()


async def _end_by_signal(site: Site) -> None:
    """End the process: a thread that waits for stdin is ended by nothing else."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            with anyio.move_on_after(site.options.drain_s):
                await site.close()
            sys.stderr.flush()
            os._exit(0)
