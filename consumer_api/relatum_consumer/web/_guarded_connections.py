"""Connections as the page takes them: one that says nothing, or takes nothing, does not keep its place."""

import asyncio
import socket
from collections import Counter
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from relatum_consumer.web._limits import client_of

CONNECTIONS_MAX: Final = 500
"""Connections at once."""

OF_ONE_MAX: Final = CONNECTIONS_MAX // 2
"""Of one client: it never has all of them."""

QUIET_S: Final = 30.0
"""Seconds for a request's headers, and until something of an answer is taken. uvicorn would wait for ever."""

LOOK_S: Final = 5.0
"""Seconds between two looks."""


class GuardedConnection(H11Protocol):
    """A connection that is closed where nothing comes of it: no request, or nobody who takes its answer."""

    clients: ClassVar[Counter[str]]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it, where its client does not have too many."""
        super().connection_made(transport)
        # asyncio does so by itself only where a socket names its protocol: one made by `create_server` does not.
        # Without, the second write of an answer waits for a client that puts off its acknowledgement: 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._who = client_of({"client": self.client})
        self._left = 0
        self._moved_at = self.loop.time()
        self.clients[self._who] += 1
        self._look_again = self.loop.call_later(LOOK_S, self._look)
        if self.clients[self._who] > OF_ONE_MAX:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._look_again.cancel()
        self.clients[self._who] -= 1
        if not self.clients[self._who]:
            del self.clients[self._who]
        super().connection_lost(exc)

    def _look(self) -> None:
        now, left = self.loop.time(), self.transport.get_write_buffer_size()
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if left != self._left or (is_answering and not left):
            self._moved_at = now
        self._left = left
        if now - self._moved_at >= QUIET_S:
            self.transport.abort()
            return
        self._look_again = self.loop.call_later(LOOK_S, self._look)


def guarded() -> type[Any]:
    """The class of one server's connections."""
    return type("Guarded", (GuardedConnection,), {"clients": Counter()})
