"""The web page and its JSON API, built on `AsyncRelations`. Needs the extra `web`.

    with WebServer(WebOptions("amqp://…", "postgresql://…")) as server:
        print(server.url)

`relatum web` runs it. `make_application` returns the same page as an ASGI application, for your own server.
"""

from typing import TYPE_CHECKING

from relatum.common.faces import lazy_attributes

if TYPE_CHECKING:
    from relatum_consumer.web.application import WebServer, make_application
    from relatum_consumer.web.options import WebOptions

__all__ = ["WebOptions", "WebServer", "make_application"]

_MODULE_BY_NAME = {
    "WebOptions": "relatum_consumer.web.options",
    "WebServer": "relatum_consumer.web.application",
    "make_application": "relatum_consumer.web.application",
}

# Imported on first use, so that `relatum --help` works without the extra.
__getattr__ = lazy_attributes(__name__, _MODULE_BY_NAME)
