"""The interception of what forks and connects later: each process that publishes has one of its own."""

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from relatum.processes import after_fork, leave_to_parent
from relatum.publishing._embedded import EmbeddedRecorders
from relatum.publishing._interception import ATTRIBUTE, Interception, Options
from relatum.publishing._publisher_statistics import PublisherCounts
from relatum.superstreams.connections import address_of
from relatum.superstreams.streams import ensure_stream


class ProcessInterceptions:
    """What an intercepted Celery app or broker keeps.

    Where it is made, nothing may be known of the broker yet, and a worker has not forked its children. So there is no
    recorder and no connection until a process publishes.

    Attributes:
        options: What `intercept` was asked for.
        active: False once released: everything then passes through untouched.
        lock: Held for a moment by who counts, covers or releases: an app's threads publish at the same time.
        nodes: Where its connections may lead, where they do not say so themselves: parameters of pika's.
    """

    def __init__(self, options: Options, client: str) -> None:
        self.options = options
        self.active = True
        self.lock = threading.Lock()
        self.nodes: Sequence[Any] = ()
        self._client = client
        self._starting = threading.Lock()
        self._present: Interception | None = None
        self._covered: WeakKeyDictionary[Any, ModuleType] = WeakKeyDictionary()
        after_fork(self, ProcessInterceptions._renew)
        if options.database is not None:
            EmbeddedRecorders.prepare()

    def _renew(self) -> None:
        """In a child: recorder, counts and locks are the parent's."""
        self.lock, self._starting = threading.Lock(), threading.Lock()
        leave_to_parent(self._present)
        self._present = None

    @property
    def counts(self) -> PublisherCounts:
        """What this process has counted."""
        return PublisherCounts() if self._present is None else self._present.counts

    def check_usable(self) -> None:
        """Nothing: it is of all processes."""

    def current(self, connection: Any, *, may_wait: bool = True) -> Interception | None:
        """The interception of this process, made with the first connection that publishes; None once released.

        Raises:
            KeyDefinitionConflict, InvalidKeyDefinition: the database defines the keys otherwise.
            RelatumError: there is no stream for copies, and none can be declared.
        """
        with self._starting:
            if self.active and self._present is None:
                source = self.options.broker_url or connection
                address = address_of(source, self.options.stream_url, self.nodes)
                stream = self.options.copy_to
                if stream is not None:
                    ensure_stream(address, stream)
                self._present = Interception(self.options, address, self._client)
                if stream is not None:
                    self._present.watch("", stream)
            present = self._present
        if present is None or not self.active:
            # What was made while `release` ran is given back here.
            self._give_back()
            return None
        # Each channel's first publish waits for what is left of that second.
        present.await_agreement(may_wait=may_wait)
        return present

    def cover(self, connection: Any, client: ModuleType) -> Interception | None:
        """Have a connection publish through this process's interception until `release`; `client` knows its kind."""
        interception: Interception | None = getattr(connection, ATTRIBUTE, None)
        if interception is None:
            interception = self.current(connection, may_wait=client.may_wait(connection))
            with self.lock:
                if interception is None or not self.active:
                    return None
                client.intercept(connection, interception)
                self._covered[connection] = client
        return interception

    def release(self) -> None:
        """Put everything back, and give back what this process has; see `Interception.release`."""
        self.active = False
        with self.lock:
            covered, self._covered = list(self._covered.items()), WeakKeyDictionary()
        for connection, client in covered:
            if hasattr(connection, ATTRIBUTE):
                client.release(connection)
        self._give_back()

    def _give_back(self) -> None:
        with self.lock:
            present, self._present = self._present, None
        if present is not None:
            present.release()
