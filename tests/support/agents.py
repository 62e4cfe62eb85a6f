"""Agents: the protocol's own client, over stdio to a process of its own or over HTTP, for tests that wait."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from anyio.from_thread import BlockingPortal, start_blocking_portal
from httpx2 import AsyncClient
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult

from relatum import Broker
from relatum_consumer.web import WebOptions

COMMAND: Final = str(Path(sys.executable).parent / "relatum")


class Agent:
    """Calls tools."""

    def __init__(self, portal: BlockingPortal, client: Client) -> None:
        self._portal = portal
        self.client = client

    def run(self, function: Any, *arguments: Any) -> Any:
        return self._portal.call(function, *arguments)

    def call(self, tool: str, **arguments: Any) -> CallToolResult:
        result: CallToolResult = self.run(partial(self.client.call_tool, tool, arguments))
        return result

    def together(self, calls: list[tuple[str, dict[str, Any]]]) -> list[CallToolResult]:
        called = [self._portal.start_task_soon(self.client.call_tool, *each) for each in calls]
        return [each.result() for each in called]

    def result(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """What a tool gives: the same as text and as JSON, which the client has compared with its schema."""
        result = self.call(tool, **arguments)
        assert not result.is_error, text_of(result)
        assert json.loads(text_of(result)) == result.structured_content
        return dict(result.structured_content)

    def answer(self, tool: str, **arguments: Any) -> dict[str, Any]:
        return dict(self.result(tool, **arguments)["answer"])

    def error(self, tool: str, **arguments: Any) -> str:
        result = self.call(tool, **arguments)
        assert result.is_error, text_of(result)
        assert result.structured_content is None
        return text_of(result)


def text_of(result: CallToolResult) -> str:
    assert len(result.content) == 1
    return str(result.content[0].text)  # type: ignore[union-attr]


@contextmanager
def _agent(server: Any, **options: Any) -> Iterator[Agent]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(Client(server, **options)) as client:
        yield Agent(portal, client)


@contextmanager
def over_stdio(options: WebOptions, *arguments: str, mode: str = "auto") -> Iterator[Agent]:
    broker = options.broker if isinstance(options.broker, Broker) else Broker(options.broker)
    given = {"RELATUM_BROKER_URL": broker.url, "RELATUM_DATABASE_URL": options.database}
    given["RELATUM_STREAM_URL"] = broker.stream_url or ""
    server = StdioServerParameters(command=COMMAND, args=["mcp", *arguments], env={**os.environ, **given})
    with _agent(server, mode=mode) as agent:
        yield agent


@contextmanager
def over_http(url: str, headers: Mapping[str, str] | None = None, *, mode: str = "auto") -> Iterator[Agent]:
    client = AsyncClient(headers=dict(headers or {}), timeout=60)
    with _agent(streamable_http_client(f"{url}mcp", http_client=client), mode=mode) as agent:
        try:
            yield agent
        finally:
            agent.run(client.aclose)
