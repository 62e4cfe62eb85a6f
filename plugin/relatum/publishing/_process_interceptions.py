"""The interception of what forks and connects later: each process that publishes has one of its own."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from relatum.processes import after_fork, leave_to_parent
from relatum.publishing._embedded import EmbeddedRecorders
from relatum.publishing._interception import Interception, Options
from relatum.publishing._publisher_statistics import PublisherCounts
from relatum.publishing.clients._attributes import Replacement, put, put_back
from relatum.superstreams import address_of, ensure_stream


class ProcessInterceptions:
    """What an intercepted Celery app or broker keeps, and all that is made of it shares.

    Where it is made, nothing may be known of the broker yet, and a worker has not forked its children. So there is no
    recorder and no connection until a process publishes.

    Attributes:
        options: What `intercept` was asked for.
        active: False once released: everything then passes through untouched.
        lock: Held for a moment by who counts: an app's threads publish at the same time.
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
        self._undone_by: WeakKeyDictionary[Any, list[Callable[[Any], None]]] = WeakKeyDictionary()
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

    def current(self, connection: Any, *, may_wait: bool = True) -> Interception:
        """The interception of this process, made with the first connection that publishes.

        Raises:
            KeyDefinitionConflict, InvalidKeyDefinition: the database defines the keys otherwise.
            RelatumError: there is no stream for copies, and none can be declared.
        """
        with self._starting:
            if self._present is None:
                source = self.options.broker_url or connection
                address = address_of(source, self.options.stream_url, self.nodes)
                stream = self.options.copy_to
                if stream is not None:
                    ensure_stream(address, stream)
                self._present = Interception(self.options, address, self._client)
                if stream is not None:
                    self._present.watch("", stream)
            present = self._present
        # Each channel's first publish waits for what is left of that second.
        present.await_agreement(may_wait=may_wait)
        return present

    def put(self, owner: Any, name: str, replacement: Replacement) -> None:
        """Have it stand in for a method of an object, until `release`."""
        put(owner, name, replacement)
        self.at_release(owner, partial(put_back, name=name))

    def at_release(self, owner: Any, undo: Callable[[Any], None]) -> None:
        """Do `undo(owner)` at `release`, if the object is still there; `undo` must not hold it."""
        with self.lock:
            self._undone_by.setdefault(owner, []).append(undo)

    def covers(self, owner: Any) -> bool:
        """Whether something is put back at that object."""
        with self.lock:
            return owner in self._undone_by

    def release(self) -> None:
        """Put everything back, and give back what this process has; see `Interception.release`."""
        self.active = False
        with self.lock:
            undone_by, self._undone_by = list(self._undone_by.items()), WeakKeyDictionary()
        for owner, undone in undone_by:
            for undo in undone:
                undo(owner)
        present, self._present = self._present, None
        if present is not None:
            present.release()
