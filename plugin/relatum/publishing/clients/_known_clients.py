"""Which client a connection is of."""

from importlib import import_module
from types import ModuleType
from typing import Any, Final

import pika

from relatum.errors import ConfigurationError
from relatum.publishing.clients import _pika as _pika

_OTHERS: Final = {
    "aio_pika": "relatum.publishing.clients._aio_pika",
    "celery.app.base": "relatum.publishing.clients._celery",
    "dramatiq.brokers.rabbitmq": "relatum.publishing.clients._dramatiq",
    "faststream.rabbit.broker.broker": "relatum.publishing.clients._faststream",
}
"""By the module that has the connection's class, or a package of it. Imported only then: whoever has one has those."""


def client_of(connection: Any) -> ModuleType:
    """The module that knows this kind of connection: `intercept`, `release`, `may_wait`, `NAME`, `IS_OF_PROCESSES`."""
    if isinstance(connection, (pika.BlockingConnection, pika.connection.Connection)):
        return _pika
    # Of its class, as proxies say it.
    for kind in connection.__class__.__mro__:
        known = _OTHERS.get(kind.__module__) or _OTHERS.get(kind.__module__.partition(".")[0])
        if known is not None:
            return import_module(known)
    raise ConfigurationError(
        f"{type(connection).__qualname__} is no connection of pika or aio-pika, no Celery app, and no broker of "
        "dramatiq or faststream.rabbit; for other clients: relatum.stamped(…) and relatum.recording_here(…)"
    )
