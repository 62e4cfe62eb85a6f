"""The affinity sets of a router: finds the set of a message, and closes sets that have ended.

A message's headers name its set, or a predecessor whose set the message joins. A thread reports the use of sets to the
database and closes sets that have ended; publishers never wait for this thread.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple, NoReturn

import sqlalchemy as sa

from relatum.common.checks import seconds_text
from relatum.common.headers import AFFINITY_LAST_HEADER, PREDECESSOR_HEADER
from relatum.common.ids import MessageId
from relatum.common.waiting import Outages, backoff
from relatum.contexts._placement_store import PlacementStore
from relatum.contexts._placements import check_name
from relatum.contexts._publication import POLL_S
from relatum.contexts._router_core import RouterCore
from relatum.contexts._super_stream_rows import IDLE_S_MIN, USE_REPORT_S
from relatum.errors import ContextMoving, InvalidInput, NotFound, PredecessorNotFound, RelatumError
from relatum.keys import InvalidValue, KeyDefinition
from relatum.reading import Message
from relatum.store.catalog import key_definitions
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values

logger = logging.getLogger("relatum.affinity")

BATCH_S: Final = 0.1
"""Seconds for which the thread gathers ended sets into one transaction."""

CLOSE_S: Final = 5.0
"""Seconds that closing a router waits for PostgreSQL."""

SOURCE: Final = ("property:message_id",)
"""The source of the key that finds messages by their `message_id`."""

_SAME_ID_MAX: Final = 16
"""How many messages with one id to read, newest first: retention may have dropped the messages of some rows."""

RECORDED: Final = sql(f"""
    SELECT s.name, r.stream_offset
    FROM relatum.relationships r JOIN relatum.streams s ON s.stream_id = r.stream_id
    WHERE r.key_id = :key_id::smallint AND r.value = :value::text
        AND {part_may_hold_values("r", ":key_id::smallint", ":value::text", ":value::text")}
        AND s.vhost = :vhost::text AND s.name = ANY (:partitions::text[]) AND s.replaced_at IS NULL
    ORDER BY r.time_us DESC NULLS LAST, r.stream_offset DESC
    LIMIT {_SAME_ID_MAX}""")
"""The rows of a key's value, newest first."""


class SetRequest(NamedTuple):
    """The set that a message's headers request: a named set, or the set of a predecessor."""

    name: str | None = None
    is_last: bool = False
    predecessor: str | None = None
    """A `message_id`, or "stream:offset"."""


def set_request_of(headers: Mapping[str, Any] | None, header: str) -> SetRequest:
    """Return the set that a message's headers request, or raise `InvalidInput` if they contradict each other."""
    if not headers:
        return SetRequest()
    name, predecessor = headers.get(header), headers.get(PREDECESSOR_HEADER)
    # A header without a value counts as missing.
    last = headers.get(AFFINITY_LAST_HEADER)
    is_last = False if last is None else last
    for value, header_name in ((name, header), (predecessor, PREDECESSOR_HEADER)):
        if value is not None:
            check_name(value, f"the header {header_name}", outcome="nothing was sent")
    if name is not None and predecessor is not None:
        why = f"a message names its affinity set ({header}) or a predecessor ({PREDECESSOR_HEADER}), not both"
    elif type(is_last) is not bool:
        why = f"the header {AFFINITY_LAST_HEADER} must be True or False, not {type(is_last).__name__}"
    elif is_last and name is None and predecessor is None:
        why = f"the header {AFFINITY_LAST_HEADER} ends an affinity set, but this message names none"
    else:
        return SetRequest(name, is_last, predecessor)
    raise InvalidInput(f"{why}; nothing was sent")


class SetPlace(NamedTuple):
    """A message's set (None: no set), and its partition's stream (None: the set's placement gives the stream)."""

    name: str | None
    stream: str | None


class Predecessors:
    """Finds predecessors: this router's recent messages in memory, others in the relationship table. Thread-safe."""

    def __init__(self, core: RouterCore, messages_max: int) -> None:
        self._core = core
        self._messages_max = messages_max
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, SetPlace] = OrderedDict()

    def remember(self, found: SetPlace, message_id: str | None) -> None:
        if not message_id:
            return
        with self._lock:
            self._recent[message_id] = found
            self._recent.move_to_end(message_id)
            if len(self._recent) > self._messages_max:
                self._recent.popitem(last=False)

    def cached(self, request: SetRequest) -> SetPlace | None:
        """Return the set or partition of a request without I/O; None: call `find`."""
        if request.predecessor is None:
            return SetPlace(request.name, None)
        with self._lock:
            if request.predecessor in self._recent:
                self._recent.move_to_end(request.predecessor)
            return self._recent.get(request.predecessor)

    def find(self, predecessor: str) -> SetPlace:
        """Read the set or partition of a predecessor from the servers."""
        with self._core.in_time():
            partitions = [row.stream for row in self._core.store.partitions()]
            place = place_in(predecessor, partitions)
            if place is None:
                return self._find_recorded(predecessor, partitions)
            try:
                return self._place_of(self._core.control_streams.reader.read(*place))
            except NotFound as error:
                raise PredecessorNotFound(
                    f"there is no predecessor at {predecessor}: {error}; nothing was sent", predecessor=predecessor
                ) from error

    def _find_recorded(self, predecessor: str, partitions: Collection[str]) -> SetPlace:
        """Find the newest message with a `message_id` in the relationship table."""
        given = {"vhost": self._core.control_streams.address.vhost, "partitions": partitions}
        with self._core.store.database.transaction() as connection:
            keys = [key for key in key_definitions(connection) if tuple(key.sources) == SOURCE]
            if not keys:
                _refuse(
                    predecessor,
                    "this router did not publish it, and no key has the property message_id as its source "
                    "(`relatum keys add message_id --source property:message_id`)",
                )
            places = [place for key in keys for place in _places(connection, key, predecessor, given)]
        for message in self._core.control_streams.reader.read_many(places):
            if isinstance(message, Message) and message.properties.message_id == predecessor:
                return self._place_of(message)
        _refuse(predecessor, "this router did not publish it, and it is not recorded, or not yet: publish again later")

    def _place_of(self, message: Message) -> SetPlace:
        name = message.headers.get(self._core.options.header)
        return SetPlace(name if isinstance(name, str) else None, message.stream)


def place_in(predecessor: str, partitions: Collection[str]) -> MessageId | None:
    """Return the place that "stream:offset" names; None: the text is an id, which may contain colons, too."""
    stream, separator, offset = predecessor.rpartition(":")
    if not separator or stream not in partitions or not (offset.isascii() and offset.isdecimal()):
        return None
    return MessageId(stream, int(offset))


def _places(
    connection: sa.Connection, key: KeyDefinition, message_id: str, given: Mapping[str, Any]
) -> list[MessageId]:
    try:
        value = key.canonical_query(message_id)
    except InvalidValue:
        # The key is an integer and the id is not, so the id was never recorded.
        return []
    rows = connection.execute(RECORDED, {**given, "key_id": key.key_id, "value": value})
    return [MessageId(stream, offset) for stream, offset in rows]


def _refuse(predecessor: str, why: str) -> NoReturn:
    raise PredecessorNotFound(
        f"the predecessor {predecessor[:80]!r} is unknown: {why}; nothing was sent", predecessor=predecessor
    )


class SetLifecycle:
    """Reports the use of one router's sets, and closes them. Thread-safe. Its thread calls `settle`."""

    def __init__(self, core: RouterCore, settle: Callable[[str], None]) -> None:
        self._core = core
        self._settle = settle
        self._report_at = time.monotonic() + USE_REPORT_S
        self._lock = threading.Lock()
        self._used_names: set[str] = set()
        self._ending: dict[str, int] = {}
        self._closing = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def record_use(self, name: str, epoch: int, *, is_last: bool) -> None:
        """Record a confirmed message of a set: the set is in use, or ends with this message."""
        with self._lock:
            if self._thread is None:
                # From Python 3.12 on, no thread can start at interpreter shutdown. The message was published anyway.
                with suppress(RuntimeError):
                    thread = threading.Thread(target=self._run, name="relatum affinity sets", daemon=True)
                    thread.start()
                    self._thread = thread
            if not is_last:
                self._used_names.add(name)
                return
            self._ending[name] = epoch
            self._used_names.discard(name)

    def is_ending(self, name: str) -> bool:
        """Return whether this router has ended a set that is not closed yet."""
        return name in self._ending

    def close_ended(self, name: str) -> None:
        """Close a set that this router has ended, so that the next message of its name opens a new set. May block."""
        core = self._core
        core.publications.settle(name)
        deadline = time.monotonic() + core.options.timeout_s
        while (epoch := self._ending.get(name)) is not None and not self._close_sets({name: epoch}):
            if time.monotonic() >= deadline:
                placement = core.store.find([name]).get(name)
                raise ContextMoving(
                    f"the affinity set {name!r} has ended, but its move has not ended within "
                    f"{seconds_text(core.options.timeout_s)}; nothing was sent: publish again",
                    context=name,
                    move_id=0 if placement is None else placement.move_id,
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        """Close the sets that have ended, and end the thread. Waits a few seconds for PostgreSQL."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        self._stop.set()
        if self._ending:
            logger.warning(
                "%d affinity sets of %r are still open after their last message: `relatum affinity close` closes them",
                len(self._ending),
                self._core.super_stream,
            )

    def _run(self) -> None:
        core, pauses = self._core, backoff()
        task = f"closing affinity sets of {core.super_stream!r}"
        outages = Outages(logger, broker=str(core.control_streams.address), database=core.store.database.address.name)
        while not self._stop.is_set():
            is_last = self._closing.wait(BATCH_S)
            try:
                is_done = self._maintain(is_last=is_last)
            except Exception as error:  # noqa: BLE001 it is logged, and the thread continues
                if self._stop.is_set():
                    return  # The connections are closed.
                is_done = False
                outages.failed(task, error)
            else:
                outages.over(task)
            if is_last and is_done:
                return
            if is_done:
                pauses = backoff()
            else:
                self._stop.wait(next(pauses))

    def _maintain(self, *, is_last: bool) -> bool:
        with self._lock:
            ending = dict(self._ending)
        # First, because settling may wait for a move, and other routers close sets whose use is not reported.
        if is_last or time.monotonic() >= self._report_at:
            # Set before, so that a report that fails does not keep sets from being closed.
            self._report_at = time.monotonic() + USE_REPORT_S
            self._report_use()
        failures = self._settle_unchecked()
        is_done = self._close_sets({name: epoch for name, epoch in ending.items() if name not in failures})
        if failures:
            raise next(iter(failures.values()))
        return is_done

    def _settle_unchecked(self) -> dict[str, RelatumError]:
        """Make earlier messages valid: no later check includes a set that has ended. Return the errors of sets."""
        unchecked, failures = self._core.publications.unchecked, dict[str, RelatumError]()
        if not len(unchecked):
            return failures
        mark = unchecked.mark()
        self._core.publications.look()
        for name in unchecked.names():
            # Few names remain: a move changed their placement, or another process closed the set.
            if unchecked.of(name, mark):
                try:
                    self._settle(name)
                except RelatumError as error:
                    failures[name] = error
        return failures

    def _close_sets(self, ending: dict[str, int]) -> bool:
        if not ending:
            return True
        still_moving = self._core.store.release(ending.items())
        closed = {name: epoch for name, epoch in ending.items() if name not in still_moving}
        self._core.publications.cache.forget(closed)
        with self._lock:
            for name, epoch in closed.items():
                if self._ending.get(name) == epoch:
                    del self._ending[name]
        return not still_moving

    def _report_use(self) -> None:
        with self._lock:
            used, self._used_names = self._used_names, set()
        try:
            if used:
                self._core.store.touch(used)
            # Read `idle_s` each time: operators may change it.
            idle_s = self._core.store.idle_s()
            if idle_s is not None:
                # A stored `idle_s` may be below the minimum, and other routers may report their latest use later.
                close_idle(self._core.store, max(idle_s, IDLE_S_MIN) + USE_REPORT_S)
        except RelatumError:
            with self._lock:
                self._used_names |= used
            raise


def close_idle(store: PlacementStore, idle_s: float) -> int:
    """Close the sets that were unused for `idle_s` seconds, and return their number. Moving sets stay open."""
    closed = 0
    while idle := store.idle(idle_s):
        still_moving = store.release([(each.name, each.epoch) for each in idle])
        closed += len(idle) - len(still_moving)
        if still_moving:
            break
    return closed
