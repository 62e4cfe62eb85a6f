"""Which client a connection is of."""

from collections.abc import Callable
from importlib import import_module
from inspect import iscoroutinefunction
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
    "kombu.connection": "relatum.publishing.clients._kombu",
    "kombu.pools": "relatum.publishing.clients._kombu",
}
"""By the module that has the connection's class, or a package of it. Imported only then: whoever has one has those."""

_RECEIPTS: Final = {
    "faststream.rabbit.broker.broker": "relatum.publishing.clients._faststream",
    "kombu.messaging": "relatum.publishing.clients._kombu",
}
"""Those whose client makes the message that is sent, and that publish with a receipt all the same."""


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
        f"{type(connection).__qualname__} is no connection of pika, aio-pika or kombu, no pool of kombu, no Celery "
        "app, and no broker of dramatiq or faststream.rabbit"
    )


def receipts_of(target: Any, *, is_async: bool) -> Callable[..., Any] | None:
    """What publishes with a receipt by a producer or a broker whose client makes the message itself; else None.

    Raises:
        ConfigurationError: it is for the other of `publish` and `publish_async`.
    """
    for kind in target.__class__.__mro__:
        known = _RECEIPTS.get(kind.__module__)
        if known is not None:
            with_receipt: Callable[..., Any] = import_module(known).with_receipt
            if iscoroutinefunction(with_receipt) is is_async:
                return with_receipt
            right = "relatum.publish(…)" if is_async else "await relatum.publish_async(…)"
            raise ConfigurationError(f"a {kind.__qualname__} of {kind.__module__.partition('.')[0]} takes {right}")
    return None
