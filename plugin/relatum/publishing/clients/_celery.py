"""Celery: an app, of which every process that publishes is intercepted by itself. Imported only with such an app.

An app makes its connections by one method, for its pools too, and forgets the pools of a process that it is forked off
from. So that method is watched.
"""

from typing import Any, Final

from kombu.transport.pyamqp import Transport

from relatum.publishing._interception import ATTRIBUTE
from relatum.publishing._process_interceptions import ProcessInterceptions
from relatum.publishing.clients._attributes import Wrapper
from relatum.publishing.clients._kombu import IS_OF_PROCESSES, cover, forget_pools, may_wait

__all__ = ["IS_OF_PROCESSES", "NAME", "intercept", "may_wait", "release"]

NAME: Final = "celery"
"""The client, as metrics name it."""


def intercept(app: Any, interceptions: ProcessInterceptions) -> None:
    """Publish through the interception on all connections that the app will make. Its settings are not read yet."""

    def made(connection: Any) -> None:
        # In tests an app may have a broker in memory: it has no streams, and goes on as it is.
        if issubclass(connection.get_transport_cls(), Transport):
            cover(connection, interceptions)

    interceptions.put(app, "_connection", Wrapper(app._connection, interceptions, made))
    setattr(app, ATTRIBUTE, interceptions)
    _forget_pools(app)


def release(app: Any) -> None:
    """Put back what was there before: `ProcessInterceptions.release` does it, of all connections of the app."""
    if app._pool is not None:
        forget_pools(app._pool.connection)
    _forget_pools(app)
    delattr(app, ATTRIBUTE)


def _forget_pools(app: Any) -> None:
    """Have the app ask for its pools anew: those of an intercepted app are its own, others' are `kombu.pools`'."""
    app._pool = None
    amqp = vars(app).get("amqp")
    if amqp is not None:
        amqp._producer_pool = None
