"""Which client a connection is of."""

from types import ModuleType
from typing import Any

import pika

from relatum.errors import ConfigurationError
from relatum.publishing.clients import _pika as _pika


def client_of(connection: Any) -> ModuleType:
    """The module that knows this kind of connection: `intercept`, `release`, `may_wait`, `NAME`, `IS_OF_PROCESSES`."""
    if isinstance(connection, (pika.BlockingConnection, pika.connection.Connection)):
        return _pika
    # Only now: these are optional, and whoever has such a connection has imported it. Of its class, as proxies say it.
    modules = {kind.__module__ for kind in connection.__class__.__mro__}
    if any(module.partition(".")[0] == "aio_pika" for module in modules):
        from relatum.publishing.clients import _aio_pika as _aio_pika

        return _aio_pika
    if "celery.app.base" in modules:
        from relatum.publishing.clients import _celery as _celery

        return _celery
    if not modules.isdisjoint(("kombu.connection", "kombu.pools")):
        from relatum.publishing.clients import _kombu as _kombu

        return _kombu
    raise ConfigurationError(
        f"{type(connection).__qualname__} is no connection of pika, aio-pika or kombu, no pool of kombu, no Celery app"
    )
