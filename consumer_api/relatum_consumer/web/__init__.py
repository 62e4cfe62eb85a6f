"""The page: search, messages, streams and a JSON API for a browser, on `AsyncRelations`. Needs the extra `web`.

    with WebServer(WebOptions("amqp://…", "postgresql://…")) as server:
        print(server.url)

`relatum web` runs it. `make_application` returns the same page as an ASGI application, for your own server.
"""

from typing import TYPE_CHECKING

from relatum.common.faces import imported_later

if TYPE_CHECKING:
    from relatum_consumer.web.application import WebServer, make_application
    from relatum_consumer.web.options import WebOptions

__all__ = ["WebOptions", "WebServer", "make_application"]

_HOMES = {
    "WebOptions": "relatum_consumer.web.options",
    "WebServer": "relatum_consumer.web.application",
    "make_application": "relatum_consumer.web.application",
}

# Imported on first use: the command's help works without the extra.
__getattr__ = imported_later(__name__, _HOMES)
