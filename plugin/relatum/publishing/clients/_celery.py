"""Celery: an app, of which every process that publishes is intercepted by itself. Imported only with such an app.

An app makes its connections by one method, for its pools too, and forgets the pools of a process that it is forked off
from. So that method is watched.
"""

import os
import weakref
from _thread import start_new_thread
from typing import Any, Final

from celery.local import Proxy
from kombu.transport.pyamqp import Transport

from relatum.publishing._interception import ATTRIBUTE
from relatum.publishing._process_interceptions import ProcessInterceptions
from relatum.publishing.clients._attributes import Wrapper
from relatum.publishing.clients._kombu import (
    IS_OF_PROCESSES,
    close_pools,
    cover,
    forget_pools,
    may_wait,
    pools_name,
)

__all__ = ["IS_OF_PROCESSES", "NAME", "intercept", "may_wait", "release"]

NAME: Final = "celery"
"""The client, as metrics name it."""


def intercept(app: Any, interceptions: ProcessInterceptions) -> None:
    """Publish through the interception on all connections that the app will make. Its settings are not read yet."""
    if type(app) is Proxy:
        # `celery.current_app` stands for an app, and nothing can be noted of itself.
        app = app._get_current_object()

    def made(connection: Any) -> None:
        # In tests an app may have a broker in memory: it has no streams, and goes on as it is.
        if issubclass(connection.get_transport_cls(), Transport):
            cover(connection, interceptions)

    interceptions.put(app, "_connection", Wrapper(app._connection, interceptions, made))
    setattr(app, ATTRIBUTE, interceptions)
    weakref.finalize(app, _dropped, pools_name(interceptions), os.getpid()).atexit = False
    _forget_pools(app)


def release(app: Any) -> None:
    """Put back what was there before: `ProcessInterceptions.release` does it, of all connections of the app."""
    close_pools(pools_name(getattr(app, ATTRIBUTE)))
    _forget_pools(app)
    delattr(app, ATTRIBUTE)


def _dropped(name: str, process: int) -> None:
    """Let the pools of an app go that was dropped without `release`; a parent's connections are the parent's to end."""
    if os.getpid() == process:
        # In a thread: the garbage collector drops an app in whichever it happens to run.
        start_new_thread(close_pools, (name,))
    else:
        forget_pools(name)


def _forget_pools(app: Any) -> None:
    """Have the app ask for its pools anew: those of an intercepted app are its own, others' are `kombu.pools`'."""
    for owner, name in ((app, "_pool"), (vars(app).get("amqp"), "_producer_pool")):
        if getattr(owner, name, None) is not None:
            setattr(owner, name, None)
