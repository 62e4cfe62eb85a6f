"""Key definitions and stream names, cached for a second, and the values to search for."""

import shlex
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, NoReturn
from uuid import UUID

import sqlalchemy as sa

from relatum.common.checks import meant
from relatum.errors import (
    InvalidInput,
    InvalidRelationshipKey,
    KeyNotDefined,
    NotAStream,
    NothingRecorded,
    RelatumError,
    StreamNotFound,
    StreamReplaced,
    TimeNotRecorded,
    Transient,
)
from relatum.keys import InvalidValue, KeyDefinition, bases_of, described
from relatum.reading import BrokerIdentity, Message, another_broker
from relatum.store.catalog import KEYS_IN_FORCE, definitions_of
from relatum.store.database import sql
from relatum_consumer.lookups.answer import MissingKey, UnreadableStream
from relatum_consumer.lookups.servers import Servers
from relatum_consumer.lookups.telemetry import note_sought

CATALOG_AGE_S: Final = 1.0
"""Seconds for which key definitions are cached; recorders use new definitions within two seconds."""

IDENTIFY_S: Final = 60.0
"""Seconds between two queries of the broker's identity, while it is unknown."""

UNUSABLE_S: Final = 5.0
"""Seconds for which lookups without named streams leave out a stream that is gone or not the recorded one."""


def streams_meant(names: int | None) -> str:
    """Return SQL: whether `s` is present, and has one of the `name_…` parameters (their number; None: any stream)."""
    meant = "s.vhost = :vhost::text AND s.replaced_at IS NULL"
    if names is None:
        return meant
    given = [f"s.{column} = :name_{n}::text" for column in ("name", "super_stream") for n in range(names)]
    return f"{meant} AND ({' OR '.join(given)})"


def named(names: Sequence[str] | None) -> dict[str, str]:
    """Return the `name_…` parameters."""
    return {f"name_{n}": name for n, name in enumerate(names or ())}


class PresentStream(NamedTuple):
    """A recorded stream in its present generation."""

    stream_id: int
    name: str
    super_stream: str | None
    record_time: bool
    broker_id: UUID | None = None
    cluster_name: str | None = None
    generation: int = 1
    created_us: int = 0
    retained_from: int = 0


@lru_cache(maxsize=512)
def present_streams(names: int | None) -> sa.TextClause:
    """Select the columns of `PresentStream` for the streams searched."""
    return sql(f"""
        SELECT s.stream_id, s.name, s.super_stream, s.record_time, s.broker_id, b.cluster_name, s.generation,
          (extract(epoch FROM s.created_at) * 1000000)::bigint, coalesce(s.retained_from, 0)
        FROM relatum.streams s
        LEFT JOIN relatum.brokers b ON b.broker_id = s.broker_id
        WHERE {streams_meant(names)}
        ORDER BY s.name""")


_OTHER_VHOSTS: Final = sql("""
    SELECT vhost, count(*)
    FROM relatum.streams
    WHERE vhost <> :vhost::text AND replaced_at IS NULL
    GROUP BY vhost
    ORDER BY vhost
    LIMIT 5""")

_REMOVED: Final = sql(
    "SELECT name FROM relatum.keys WHERE key_id = ANY (:key_ids::smallint[]) AND removed_at IS NOT NULL"
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A key and the value to search for, in canonical form."""

    definition: KeyDefinition
    value: str

    @property
    def key_id(self) -> int:
        """The key's id in the database."""
        return self.definition.key_id

    def is_of(self, message: Message) -> bool:
        """Whether the message carries the value."""
        return self.value in self.definition.values_of(message)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    definitions: Mapping[str, KeyDefinition]
    streams: tuple[str, ...]
    by_name: Mapping[str, tuple[str, ...]]
    brokers: Mapping[str, BrokerIdentity]
    read_at: float


class Catalog:
    """Caches the keys and streams in the database. Thread-safe: a snapshot is replaced as a whole.

    A stale snapshot makes an answer at most a second old, never wrong: key ids are never reused, every message is
    checked against the definition that was used, and the statements read the streams again.
    """

    def __init__(self, servers: Servers, vhost: str) -> None:
        self.servers = servers
        self.vhost = vhost
        self._snapshot: _Snapshot | None = None
        self._is_being_read = False
        self._identity = BrokerIdentity(None, "")
        self._identify_at = 0.0
        self._others: tuple[_Snapshot | None, Mapping[str, BrokerIdentity]] = (None, {})
        """A snapshot, and its streams that were recorded from other brokers."""
        self._unusable: dict[str, tuple[RelatumError, float]] = {}
        """By stream that is not the recorded one: the error, and the monotonic time until which it is left out."""

    def _current(self, *, fresh: bool = False) -> _Snapshot:
        snapshot = self._snapshot
        if snapshot is None or fresh:
            return self._read()
        age_s = time.monotonic() - snapshot.read_at
        # One caller reads a new snapshot; the others use the old one meanwhile, up to twice its age.
        if age_s <= CATALOG_AGE_S or (self._is_being_read and age_s <= 2 * CATALOG_AGE_S):
            return snapshot
        self._is_being_read = True
        try:
            return self._read()
        finally:
            self._is_being_read = False

    def _read(self) -> _Snapshot:
        now = time.monotonic()
        keys = self.servers.rows(KEYS_IN_FORCE, {})
        rows = self.servers.rows(present_streams(None), {"vhost": self.vhost})
        recorded = sorted((PresentStream(*row) for row in rows), key=attrgetter("name"))
        by_name: dict[str, list[str]] = defaultdict(list)
        for stream in recorded:
            for name in {stream.name, stream.super_stream or stream.name}:
                by_name[name].append(stream.name)
        self._snapshot = snapshot = _Snapshot(
            {each.name: each for each in definitions_of(keys)},
            tuple(stream.name for stream in recorded),
            {name: tuple(streams) for name, streams in by_name.items()},
            {each.name: BrokerIdentity(each.broker_id, each.cluster_name or "") for each in recorded if each.broker_id},
            now,
        )
        return snapshot

    def keys(self) -> tuple[KeyDefinition, ...]:
        """Return the definitions in force, ordered by name."""
        snapshot = self._current()
        return tuple(snapshot.definitions[name] for name in sorted(snapshot.definitions))

    def all_streams(self) -> tuple[str, ...]:
        """Return the names of all recorded streams, in order."""
        return self._current().streams

    def definition(self, key: str) -> KeyDefinition:
        """Return a key's definition; raises `KeyNotDefined`."""
        if not isinstance(key, str):
            raise InvalidInput(f"a key's name must be text, not {type(key).__name__}")
        found = self._current().definitions.get(key) or self._current(fresh=True).definitions.get(key)
        if found is None:
            hint = meant(key, self._current().definitions)
            remedy = "`relatum keys list` lists the defined keys, `relatum keys add` defines one"
            raise KeyNotDefined(f"no key {key!r} is defined{hint}: {remedy}", key=key)
        return found

    def check_in_force(self, key_ids: Iterable[int]) -> None:
        """Check in the database that keys are in force; raises `KeyNotDefined`."""
        ids = list(key_ids)
        for (name,) in self.servers.rows(_REMOVED, {"key_ids": ids}) if ids else ():
            self._snapshot = None  # The next use reads a new one.
            raise KeyNotDefined(f"the key {name!r} was removed, and perhaps defined anew: repeat the lookup", key=name)

    def definitions(self, keys: Sequence[str] | None) -> list[KeyDefinition]:
        """Return the definitions of keys; None for all keys."""
        if keys is not None:
            return [self.definition(key) for key in dict.fromkeys(keys)]
        found = self._current().definitions or self._current(fresh=True).definitions
        if not found:
            raise KeyNotDefined("no key is defined: define one with `relatum keys add`", key="")
        return list(found.values())

    def values_of(
        self, message: Message, keys: Sequence[str] | None
    ) -> tuple[tuple[Wanted, ...], tuple[MissingKey, ...]]:
        """Return a message's values of the keys (None: all keys), and the keys of which it has no value."""
        wanted: list[Wanted] = []
        missing_keys: list[MissingKey] = []
        definitions, base_of = self.definitions(keys), bases_of(message)
        for definition in definitions:
            values, reasons = definition.read(base_of)
            wanted += [Wanted(definition, value) for value in values]
            if not values:
                source = " + ".join(definition.sources)
                reason = f"{source} is not a valid value: {reasons[0]}" if reasons else f"no {source}"
                missing_keys.append(MissingKey(definition.name, reason))
        note_sought(each.definition.name for each in wanted)
        return tuple(wanted), tuple(missing_keys)

    def value_sought(self, key: str, value: Any) -> Wanted:
        """Return the key and the value to search for, in canonical form."""
        definition = self.definition(key)
        try:
            wanted = Wanted(definition, definition.canonical_query(value))
        except InvalidValue as error:
            message = f"no message can carry this value of the key {key!r}: {described(error.reason)}"
            raise InvalidRelationshipKey(message, key=key, reason=error.reason.value) from error
        note_sought([definition.name])
        return wanted

    def check_names(self, names: Sequence[str] | None) -> None:
        """Check that each name is a stream or super stream of this broker, recorded or not."""
        others = self._foreign_streams()
        if names is None:
            return
        snapshot = self._current()
        for stream in others and self.recorded(names):
            if stream in others:
                raise another_broker(stream, others[stream], self._identity)
        if all(name in snapshot.by_name for name in names):
            return
        snapshot = self._current(fresh=True)
        for name in names:
            if name not in snapshot.by_name and not self.servers.partitions(name):
                try:
                    self.servers.bounds(name)
                except StreamNotFound as error:
                    text = f"{str(error).removesuffix('.')}{meant(name, snapshot.by_name)}"
                    raise StreamNotFound(text, stream=error.stream) from error

    def _foreign_streams(self) -> Mapping[str, BrokerIdentity]:
        """Return the streams recorded from another broker, with that broker's identity; computed once per snapshot."""
        snapshot = self._current()
        computed_for, others = self._others
        if computed_for is not snapshot:
            if snapshot.brokers:
                self._identify(snapshot.brokers.values())
            others = {stream: each for stream, each in snapshot.brokers.items() if each.contradicts(self._identity)}
            self._others = snapshot, others
        return others

    def _identify(self, brokers: Iterable[BrokerIdentity]) -> None:
        """Query this broker's identity, unless it is known and matches the identities in the database."""
        now = time.monotonic()
        is_known = self._identity.broker_id is not None
        if not any(each.contradicts(self._identity) for each in brokers) if is_known else now < self._identify_at:
            return
        self._identify_at = now + IDENTIFY_S
        with suppress(Transient):
            self._identity = self.servers.identity()

    def left_out(self) -> Mapping[str, RelatumError]:
        """Return the recorded streams that lookups without named streams leave out now, with the errors."""
        now = time.monotonic()
        unusable = {stream: error for stream, (error, until) in self._unusable.items() if now < until}
        others = {stream: another_broker(stream, each, self._identity) for stream, each in self._others[1].items()}
        return unusable | others

    def unreadable_streams(self, names: Sequence[str] | None) -> tuple[UnreadableStream, ...]:
        """Return the streams that an answer leaves out, as its `unreadable_streams`; empty if streams are named."""
        left_out = {} if names is not None else self.left_out()
        return tuple(UnreadableStream(stream, str(error)) for stream, error in sorted(left_out.items()))

    def leave_out(self, error: StreamReplaced | StreamNotFound | NotAStream) -> bool:
        """Leave out the error's streams for `UNUSABLE_S`; returns False if all were left out already."""
        until, left_out = time.monotonic() + UNUSABLE_S, self.left_out()
        errors = (error, *getattr(error, "also", ()))
        new = {each.stream: (each, until) for each in errors if each.stream not in left_out}
        self._unusable = self._unusable | new
        return bool(new)

    def recorded(self, names: Sequence[str] | None, found_in: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the names of the recorded streams to search, and of the `found_in`, in order, without a statement."""
        snapshot = self._snapshot or self._current()
        if names is None:
            left_out = self.left_out()
            streams = tuple(each for each in snapshot.streams if each not in left_out) if left_out else snapshot.streams
        else:
            streams = tuple(sorted({stream for name in names for stream in snapshot.by_name.get(name, ())}))
        more = {stream for stream in found_in if stream not in snapshot.by_name}
        return tuple(sorted((*streams, *more))) if more else streams

    def nothing_recorded(self, gone: Sequence[str] = ()) -> NoReturn:
        """Raise `NothingRecorded`, or the broker's error if the broker is unavailable."""
        self.servers.reach()
        others = self.servers.rows(_OTHER_VHOSTS, {"vhost": self.vhost})
        if gone:
            state = f"all {len(gone)} recorded streams of the virtual host {self.vhost!r} were deleted from the broker"
        else:
            state = f"no stream of the virtual host {self.vhost!r} is recorded"
        elsewhere = ", ".join(f"{count} of {vhost!r}" for vhost, count in others)
        raise NothingRecorded(
            f"{state}, so its messages are unknown: start recording (`relatum record STREAM…`, or "
            "relatum.intercept(…, database=…) in the publisher), or name the streams to search and pass "
            "complete=True" + (f"; streams of other virtual hosts are recorded: {elsewhere}" if others else ""),
            vhost=self.vhost,
        )

    def streams(self, names: Sequence[str] | None, *, even_replaced: bool = False) -> list[PresentStream]:
        """Read these recorded streams, or all but those left out; `even_replaced`: but those of other brokers."""
        count = None if names is None else len(names)
        rows = self.servers.rows(present_streams(count), {"vhost": self.vhost} | named(names))
        left_out: Collection[str] = ()
        if names is None:
            left_out = self._others[1] if even_replaced else self.left_out()
        return [PresentStream(*row) for row in rows if row[1] not in left_out]


def replaced(stream: str, offset: int) -> StreamReplaced:
    """Return the error for a stream that is not the recorded one."""
    return StreamReplaced(
        f"the stream {stream!r} is not the recorded one: offset {offset} has a different message, or none. The stream "
        f"was declared again, or lost its tail: `relatum record {shlex.quote(stream)}` corrects the record",
        stream=stream,
        offset=offset,
    )


def in_partition_order(name: str) -> tuple[int, str]:
    """A sort key that puts `orders-2` before `orders-10`."""
    return len(name), name


def check_times(streams: Iterable[PresentStream]) -> None:
    """Raise `TimeNotRecorded` if the times of one of the streams are not recorded."""
    for stream in streams:
        if not stream.record_time:
            remedy = f"`relatum keys time {shlex.quote(stream.name)} --on` switches them on"
            message = f"times are not recorded for the stream {stream.name!r}: {remedy}"
            raise TimeNotRecorded(message, stream=stream.name)
