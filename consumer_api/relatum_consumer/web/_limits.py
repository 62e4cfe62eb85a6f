"""How much one client may ask: requests over time, requests at once, and bytes."""

import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relatum_consumer.web._links import MCP_PATH
from relatum_consumer.web._options import WebOptions
from relatum_consumer.web._problems import Problem
from relatum_consumer.web._rendering import Rendering

CLIENTS_MAX: Final = 10_000
"""Clients remembered, those that asked last: one that is forgotten begins anew."""

_IPV6_BITS: Final = 64
"""What of an address of IPv6 is a client: who has one has the whole network."""

WAITING_MAX: Final = 100
"""Calls of tools of one client, under way or waiting for their turn."""

_FREE: Final = "/static/"
"""What is not counted: each page brings a few of them."""


@dataclass(slots=True)
class Bucket:
    """So much over time, and so much in a moment."""

    rate: float
    most: float
    left: float
    at: float

    def take(self, amount: float, now: float) -> float:
        """Take it; 0 where there was something left, else the seconds until there is."""
        self.left = min(self.most, self.left + (now - self.at) * self.rate)
        self.at = now
        if self.left <= 0 or self.left < amount:
            return (1.0 - self.left) / self.rate
        self.left -= amount
        return 0.0


@dataclass(slots=True)
class _Client:
    requests: Bucket
    sent: Bucket
    turns: anyio.Semaphore
    under_way: int = field(default=0)


class Limits:
    """Refuses what is too much of one client with 429, and says when to come again."""

    def __init__(
        self,
        app: ASGIApp,
        options: WebOptions,
        rendering: Rendering,
        clock: Callable[[], float],
    ) -> None:
        self._app = app
        self._options = options
        self._rendering = rendering
        self._clock = clock
        self._proxies = Proxies(options)
        self._clients: OrderedDict[str, _Client] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a request where its client has not asked too much."""
        if scope["type"] != "http" or scope["path"].startswith(_FREE):
            await self._app(scope, receive, send)
            return
        # All who come by a proxy have its address.
        client = self._client(self._proxies.name_of(scope) or client_of(scope))
        now = self._clock()
        wait_s = max(client.requests.take(1, now), client.sent.take(0, now))
        # An agent calls several tools at once, and takes a refusal for a fault: its calls wait for their turn.
        is_patient = scope["path"] == MCP_PATH
        if client.under_way >= (WAITING_MAX if is_patient else self._options.requests_at_once):
            wait_s = max(wait_s, 1.0)
        if wait_s:
            await self._too_much(wait_s, scope)(scope, receive, send)
            return

        async def count(message: Message) -> None:
            if message["type"] == "http.response.body":
                client.sent.left -= len(message.get("body", b""))
            await send(message)

        if is_patient:
            # Waited for by who carries out the call: that it was given up is heard meanwhile.
            scope.setdefault("state", {})["turns"] = client.turns
        client.under_way += 1
        try:
            await self._app(scope, receive, count)
        finally:
            client.under_way -= 1

    def _client(self, name: str) -> _Client:
        client = self._clients.pop(name, None)
        if client is None:
            asked, now = self._options, self._clock()
            client = _Client(
                Bucket(asked.requests_per_s, asked.requests_burst, asked.requests_burst, now),
                Bucket(asked.bytes_per_s, 10 * asked.bytes_per_s, 10 * asked.bytes_per_s, now),
                anyio.Semaphore(asked.requests_at_once),
            )
            while len(self._clients) >= CLIENTS_MAX:
                self._clients.popitem(last=False)
        self._clients[name] = client
        return client

    def _too_much(self, wait_s: float, scope: Scope) -> Any:
        headers = {"Retry-After": str(math.ceil(wait_s))}
        hint = f"Wait for {math.ceil(wait_s)} s, and ask less at once."
        return self._rendering.problem(Problem(429, "too_many_requests", "you asked too much", hint, headers), scope)


class Proxies:
    """Who asks, as a trusted proxy says."""

    def __init__(self, options: WebOptions) -> None:
        self._header = options.trust_header
        self._networks = [ipaddress.ip_network(network) for network in options.trusted_proxies]

    def name_of(self, scope: Scope) -> str | None:
        """The name that the proxy gave; None where it gave none, or it was not one of those that are trusted."""
        if self._header is None:
            return None
        named = Headers(scope=scope).getlist(self._header)
        # Of two, one may be the client's own, which the proxy let through.
        return named[0] if len(named) == 1 and named[0] and self._is_of_one(scope) else None

    def _is_of_one(self, scope: Scope) -> bool:
        try:
            address = ipaddress.ip_address(str((scope.get("client") or [""])[0]))
        except ValueError:
            return False
        return any(address in network for network in self._networks)


def client_of(scope: Scope) -> str:
    """Who asks, as far as the network knows: an address, or a network of IPv6."""
    given = scope.get("client")
    if not given:
        return "-"
    try:
        address = ipaddress.ip_address(str(given[0]).partition("%")[0])
    except ValueError:
        return str(given[0])
    if address.version == 6 and not address.is_loopback:
        return str(ipaddress.ip_network((address, _IPV6_BITS), strict=False))
    return str(address)
