"""The page as a server: uvicorn in a thread."""

import socket
import sys
import threading
import time
from typing import Final

import uvicorn

from relatum.closing import Closing
from relatum.errors import ServerStartFailed
from relatum_consumer.web.application import make_application
from relatum_consumer.web.options import WebOptions

_CONNECTIONS_MAX: Final = 500
"""The most concurrent connections and requests."""

_START_S: Final = 60.0
"""How long the server may take to start, in seconds."""

_DRAIN_S: Final = 10
"""How long requests in progress may take after `close`, in seconds."""

_LOOK_S: Final = 0.02
"""Seconds between two checks whether the server has started."""

_HEADER_BYTES_MAX: Final = 32 << 10
"""The largest request line with headers, in bytes: room for a search with a long list of streams."""

_SILENT_MS: Final = 30_000
"""How long sent data may stay unacknowledged or unread before the client counts as gone, in milliseconds."""


class WebServer(Closing):
    """Serves the page until it is closed. A context manager.

    Args:
        options: The options of the page.

    Raises:
        ConfigurationError: the extra `mcp` is not installed.
        ServerStartFailed: the port is in use, or the server did not start, for example because a URL is invalid.
    """

    def __init__(self, options: WebOptions) -> None:
        application = make_application(options)
        try:
            family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
            self._socket = socket.create_server((options.host, options.port), family=family, backlog=128)
            # Accepted sockets inherit it. Without it an answer's second write waits 40 ms for a delayed acknowledgement
            # of the client.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sys.platform == "linux":
                # Accepted sockets inherit it: without it, a vanished client is dropped only after 15 minutes.
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS)
        except OSError as error:
            where = f"{options.host}:{options.port}"
            raise ServerStartFailed(f"cannot listen at {where}: {error.strerror or error}; try --port") from error
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}{options.root_path}/"
        self._server = uvicorn.Server(
            uvicorn.Config(
                application,
                http="h11",
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                proxy_headers=False,
                server_header=False,
                date_header=True,
                limit_concurrency=_CONNECTIONS_MAX,
                h11_max_incomplete_event_size=_HEADER_BYTES_MAX,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=_DRAIN_S,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="relatum-web", daemon=True
        )
        self._thread.start()
        ends = time.monotonic() + _START_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < ends:
            time.sleep(_LOOK_S)
        if not self._server.started:
            self.close()
            raise ServerStartFailed("the page did not start: the log says why")

    @property
    def is_running(self) -> bool:
        """Whether the server is running."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop accepting requests, give those in progress ten seconds to end, and close all connections."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
