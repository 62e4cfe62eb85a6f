"""The threads that consume bulks: each takes one of its type, and does its steps."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from relatum.collecting._bulk import Bulk, Executor
from relatum.collecting._bulk_span import BulkSpan, consuming
from relatum.collecting._bulk_steps import (
    Bury,
    Consumed,
    Execute,
    Finish,
    Forward,
    Join,
    Letter,
    Load,
    Step,
    Steps,
    consume,
    fail,
)
from relatum.collecting._collector_options import ExecutorOptions
from relatum.collecting._joined import JoinedRun, call
from relatum.collecting._ports import Abandoned
from relatum.collecting._shared import NAMED_MAX, Shared, log_defect
from relatum.errors import AccessRefused, BrokerUnavailable, ReadTimeout, RelatumError
from relatum.ids import MessageId
from relatum.publishing import Burial, DeadLetters
from relatum.reading import Result as Found
from relatum.reading import StreamReader
from relatum.steps import run

WAIT_S = 1.0
"""How often a worker without a bulk looks up; nothing depends on it."""

T = TypeVar("T")

OpenReader = Callable[[], StreamReader]


class Worker:
    """Consumes bulks of a type, in a thread of its own."""

    def __init__(
        self,
        shared: Shared,
        type: str,  # noqa: A002 - RabbitMQ's word for it
        options: ExecutorOptions,
        executor: Executor,
        *,
        open_reader: OpenReader | None,
        dead_letters: DeadLetters | None,
    ) -> None:
        self._shared = shared
        self._type = type
        self._options = options
        self._executor = executor
        self._open_reader = open_reader
        self._dead_letters = dead_letters
        self._reader: StreamReader | None = None
        self._span = BulkSpan()
        self.thread = threading.Thread(target=self._run, name=f"relatum-{type}", daemon=True)

    def _run(self) -> None:
        try:
            while (bulk := self._next()) is not None:
                self._consume(bulk)
        finally:
            if self._reader is not None:
                self._reader.close()

    def _next(self) -> Bulk | None:
        """The next bulk; None when the collector stops and there will be none."""
        shared = self._shared
        with shared.changed:
            while True:
                if shared.abandoned.is_set():
                    return None
                bulk = shared.core.take(self._type)
                if bulk is not None:
                    # There is a place in the queue now, which somebody may wait for.
                    shared.changed.notify_all()
                    return bulk
                if shared.core.is_stopping and shared.intake.is_empty and shared.core.is_idle:
                    return None
                shared.changed.wait(WAIT_S)

    def _consume(self, bulk: Bulk) -> None:
        began, consumed = time.monotonic(), Consumed([], None)
        # What is abandoned stays forwarded in the store: another member takes it over.
        with suppress(Abandoned), consuming(self._shared.store.name, bulk) as self._span:
            try:
                consumed = self._consumed(bulk)
            except Exception as error:  # noqa: BLE001 - one bulk must not end what consumes all others
                undecided(bulk, error)
            self._span.settled(consumed)
        self._shared.settle(bulk, consumed, began)

    def _consumed(self, bulk: Bulk) -> Consumed:
        try:
            return self._steps(bulk, consume(self._options, bulk, may_die=self._dead_letters is not None))
        except Abandoned:
            raise
        except Exception as error:  # noqa: BLE001 - logged, and the messages' result
            log_defect(error, self._shared.who(f"a bulk of type {self._type!r}") + " not consumed")
            return self._steps(bulk, fail(self._options, bulk, error))

    def _steps(self, bulk: Bulk, steps: Steps) -> Consumed:
        return run(steps, lambda step: self._perform(step, bulk))

    def _perform(self, step: Step, bulk: Bulk) -> Any:
        shared, member, doing = self._shared, self._shared.member, self._doing
        match step:
            case Load(places):
                load = partial(self._load, places)
                return shared.persist(lambda: self._if_reached(load, places), doing("reading messages"))
            case Forward(bulk_id, places):
                with shared.changed:
                    shared.core.loaded(bulk)
                forward = partial(shared.store.forward, member, bulk_id, places)
                return shared.persist(forward, doing("forwarding a bulk"))
            case Execute(of):
                return call(self._span.noting(self._executor), of)
            case Join():
                run = JoinedRun(shared.store, member, step, self._span.noting(self._executor), self._bury)
                return shared.persist(run.run, doing("committing results"))
            case Bury(letters):
                assert self._dead_letters is not None, "messages are dead only where there is a stream for them"
                bury, places = Burial(self._dead_letters, letters).run, [message.id for message, _ in letters]
                return shared.persist(lambda: self._if_reached(bury, places), doing("publishing dead letters"))
            case Finish(bulk_id, results):
                finish = partial(shared.store.finish, member, bulk_id, results)
                return shared.persist(finish, doing("storing results"))

    def _if_reached(self, ask: Callable[[], T], places: Sequence[MessageId]) -> T | None:
        """Ask the broker; None where this member is cut off from it, and others have these messages instead."""
        try:
            return ask()
        except (BrokerUnavailable, ReadTimeout):
            shared = self._shared
            if shared.is_cut_off and shared.store.give_back(shared.member, places):
                return None
            raise

    def _doing(self, what: str) -> str:
        return f"{what} of type {self._type!r}"

    def _bury(self, letters: Sequence[Letter]) -> Mapping[MessageId, str]:
        assert self._dead_letters is not None, "messages are dead only where there is a stream for them"
        return Burial(self._dead_letters, letters).run()

    def _load(self, places: Sequence[MessageId]) -> dict[MessageId, Found]:
        assert self._open_reader is not None, "bodies are left in streams only where there is a broker"
        if self._reader is None:
            self._reader = self._open_reader()
        try:
            found = dict(zip(places, self._reader.read_all(places), strict=True))
        except RelatumError:
            self._reader.close()
            self._reader = None
            raise
        self._span.read(found.values())
        return not_refused(found)


def not_refused(found: dict[MessageId, Found]) -> dict[MessageId, Found]:
    """What was read."""
    for each in found.values():
        if isinstance(each, AccessRefused):
            raise each
    return found


def undecided(bulk: Bulk, error: Exception) -> None:
    """Say which messages are left as they are: with this member until it ends, then another member takes them over."""
    places = ", ".join(str(message.place) for message in bulk.messages[:NAMED_MAX])
    log_defect(error, f"{len(bulk)} messages of type {bulk.type!r} without a stored result: {places}")
