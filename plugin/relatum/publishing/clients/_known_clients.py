"""Which client a connection is of."""

from types import ModuleType
from typing import Any

import pika

from relatum.errors import ConfigurationError
from relatum.publishing.clients import _pika as _pika


def client_of(connection: Any) -> ModuleType:
    """The module that knows this kind of connection: its `intercept`, `release`, `may_wait` and `NAME`."""
    if isinstance(connection, (pika.BlockingConnection, pika.connection.Connection)):
        return _pika
    if any(kind.__module__.partition(".")[0] == "aio_pika" for kind in type(connection).__mro__):
        # Only now: aio-pika is optional, and whoever has such a connection has imported it.
        from relatum.publishing.clients import _aio_pika as _aio_pika

        return _aio_pika
    raise ConfigurationError(f"{type(connection).__qualname__} is neither a pika nor an aio-pika connection")
