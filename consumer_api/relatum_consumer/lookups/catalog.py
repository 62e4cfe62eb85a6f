"""Key definitions and stream names, kept for a second; and which values of which keys a lookup means."""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, NoReturn
from uuid import UUID

import sqlalchemy as sa

from relatum.checks import meant
from relatum.errors import (
    AccessRefused,
    InvalidInput,
    InvalidRelationshipKey,
    KeyNotDefined,
    NothingRecorded,
    RelatumError,
    StreamNotFound,
    StreamReplaced,
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
"""Seconds for which key definitions are taken from memory: recorders take new ones up at the same pace."""

IDENTIFY_S: Final = 60.0
"""Seconds after which a broker that did not say which one it is is asked again."""

UNUSABLE_S: Final = 5.0
"""Seconds for which a stream that is not the recorded one is left out where none is named: a recorder puts it right."""


def streams_meant(names: int | None) -> str:
    """SQL: whether `s` is one of the streams meant: of this virtual host, in its present generation.

    `names`: How many `name_…` there are, of streams and super streams; None where all are meant.
    """
    meant = "s.vhost = :vhost::text AND s.replaced_at IS NULL"
    if names is None:
        return meant
    given = [f"s.{column} = :name_{n}::text" for column in ("name", "super_stream") for n in range(names)]
    return f"{meant} AND ({' OR '.join(given)})"


def named(names: Sequence[str] | None) -> dict[str, str]:
    """The parameters for names."""
    return {f"name_{n}": name for n, name in enumerate(names or ())}


class PresentStream(NamedTuple):
    """One recorded stream in its present generation."""

    stream_id: int
    name: str
    super_stream: str | None
    record_time: bool
    broker_id: UUID | None = None
    cluster_name: str | None = None
    generation: int = 1
    created_us: int = 0

    @property
    def broker(self) -> BrokerIdentity:
        """The broker that it was recorded from."""
        return BrokerIdentity(self.broker_id, self.cluster_name or "")


@lru_cache(maxsize=512)
def present_streams(names: int | None) -> sa.TextClause:
    """Selects what a `PresentStream` has, of the streams meant."""
    return sql(
        f"""
        SELECT s.stream_id, s.name, s.super_stream, s.record_time, s.broker_id, b.cluster_name, s.generation,
          (extract(epoch FROM s.created_at) * 1000000)::bigint
        FROM relatum.streams s
        LEFT JOIN relatum.brokers b ON b.broker_id = s.broker_id
        WHERE {streams_meant(names)}
        ORDER BY s.name
        """
    )


_OTHER_VHOSTS: Final = sql(
    """
    SELECT vhost, count(*)
    FROM relatum.streams
    WHERE vhost <> :vhost::text AND replaced_at IS NULL
    GROUP BY vhost
    ORDER BY vhost
    LIMIT 5
    """
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A key and the value sought of it, in canonical form."""

    definition: KeyDefinition
    value: str

    @property
    def key_id(self) -> int:
        """The key's number in the database."""
        return self.definition.key_id

    def is_of(self, message: Message) -> bool:
        """Whether the message carries the value."""
        return self.value in self.definition.values_of(message)


class Values(NamedTuple):
    """What a message has of some keys: the values, and the keys it has none of, each with the reason."""

    wanted: tuple[Wanted, ...]
    missing_keys: tuple[MissingKey, ...]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    definitions: Mapping[str, KeyDefinition]
    streams: tuple[str, ...]
    by_name: Mapping[str, tuple[str, ...]]
    brokers: Mapping[str, BrokerIdentity]
    read_at: float


class Catalog:
    """What the database says of keys and streams. Threads may share it: a snapshot is replaced as a whole.

    A stale snapshot cannot make an answer wrong, only a second old: key ids are never used again, every message is
    checked against the definition that was used, and the streams are looked up in the statements themselves.
    """

    def __init__(self, servers: Servers, vhost: str) -> None:
        self.servers = servers
        self.vhost = vhost
        self._snapshot: _Snapshot | None = None
        # Seconds the last proof took that was made at the end of a wait.
        self.proof_s = 0.0
        self._is_being_read = False
        self._told: set[str] = set()
        self._identity = BrokerIdentity(None, "")
        self._identify_at = 0.0
        self._others: tuple[_Snapshot | None, Mapping[str, BrokerIdentity]] = (None, {})
        """Streams of other brokers, as one snapshot has them."""
        self._unusable: dict[str, tuple[RelatumError, float]] = {}
        """Streams that were found to be others than those recorded: the error, and until when they are left out."""

    def forget(self) -> None:
        """Read anew at the next use."""
        self._snapshot = None

    def is_news(self, names: Iterable[str]) -> bool:
        """Whether some of the streams that nobody records, or of the new keys, were not logged before."""
        new = set(names) - self._told
        self._told |= new
        return bool(new)

    def _current(self, *, fresh: bool = False) -> _Snapshot:
        snapshot = self._snapshot
        if snapshot is None or fresh:
            return self._read()
        age_s = time.monotonic() - snapshot.read_at
        # One of many reads it anew; meanwhile it serves the others, but not for ever.
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
        streams = self.servers.rows(present_streams(None), {"vhost": self.vhost})
        recorded = [PresentStream(*row) for row in streams]
        brokers = {stream.name: stream.broker for stream in recorded if stream.broker_id is not None}
        definitions = {each.name: each for each in definitions_of(keys)}
        self._snapshot = snapshot = _Snapshot(definitions, *_names(recorded), brokers, now)
        return snapshot

    def keys(self) -> tuple[KeyDefinition, ...]:
        """The definitions in force, by name."""
        snapshot = self._current()
        return tuple(snapshot.definitions[name] for name in sorted(snapshot.definitions))

    def all_streams(self) -> tuple[str, ...]:
        """The names of all recorded streams, in order."""
        return self._current().streams

    def definition(self, key: str) -> KeyDefinition:
        """A key's definition."""
        if not isinstance(key, str):
            raise InvalidInput(f"a key is asked for by its name, not by {type(key).__name__}")
        found = self._current().definitions.get(key)
        if found is None:
            definitions = self._current(fresh=True).definitions
            if key not in definitions:
                hint = meant(key, definitions)
                cure = "`relatum keys list` shows those that are, `relatum keys add` defines one"
                raise KeyNotDefined(f"no key {key!r} is defined{hint}: {cure}", key=key)
            found = definitions[key]
        return found

    def definitions(self, keys: Sequence[str] | None) -> list[KeyDefinition]:
        """The definitions of keys, or of every key defined where None."""
        if keys is not None:
            return [self.definition(key) for key in dict.fromkeys(keys)]
        found = self._current().definitions or self._current(fresh=True).definitions
        if not found:
            raise KeyNotDefined("no key is defined, so nothing can be related: see `relatum keys add`", key="")
        return list(found.values())

    def values_of(self, message: Message, keys: Sequence[str] | None) -> Values:
        """The message's own values of the keys, or of every key defined where None; and the keys it has no value of."""
        wanted: list[Wanted] = []
        missing_keys: list[MissingKey] = []
        definitions, base_of = self.definitions(keys), bases_of(message)
        for definition in definitions:
            values, reasons = definition.read(base_of)
            wanted += [Wanted(definition, value) for value in values]
            if not values:
                source = " + ".join(definition.sources)
                reason = f"{source} cannot be a value: {reasons[0]}" if reasons else f"no {source}"
                missing_keys.append(MissingKey(definition.name, reason))
        self._note(wanted)
        return Values(tuple(wanted), tuple(missing_keys))

    def value_sought(self, key: str, value: Any) -> Wanted:
        """A value someone asks for."""
        definition = self.definition(key)
        try:
            wanted = Wanted(definition, definition.canonical_query(value))
        except InvalidValue as error:
            message = f"no message can carry this value of the key {key!r}: {described(error.reason)}"
            raise InvalidRelationshipKey(message, key=key, reason=error.reason.value) from error
        self._note((wanted,))
        return wanted

    def _note(self, wanted: Sequence[Wanted]) -> None:
        """Tell the lookup's span what is sought."""
        definitions = {} if self._snapshot is None else self._snapshot.definitions
        note_sought([(each.definition, each.value) for each in wanted], definitions)

    def check_names(self, names: Sequence[str] | None) -> None:
        """See that each name is a stream or super stream of this broker, recorded or not.

        Raises:
            AnotherBroker: one was recorded from another broker.
        """
        others = self._of_others()
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
                    said = f"{str(error).removesuffix('.')}{meant(name, snapshot.by_name)}"
                    raise StreamNotFound(said, stream=error.stream) from error

    # --- streams that cannot be used --------------------------------------------------------------------------

    def _of_others(self) -> Mapping[str, BrokerIdentity]:
        """The streams that were recorded from another broker, with that one. The broker is rarely asked which it is."""
        snapshot = self._current()
        known_of, others = self._others
        if known_of is not snapshot:
            if snapshot.brokers:
                self._identify(snapshot.brokers.values())
            others = {stream: each for stream, each in snapshot.brokers.items() if each.contradicts(self._identity)}
            self._others = snapshot, others
        return others

    def _identify(self, brokers: Iterable[BrokerIdentity]) -> None:
        """Ask the broker which it is, unless that is known and nothing speaks against it."""
        now = time.monotonic()
        is_known = self._identity.broker_id is not None
        if not any(each.contradicts(self._identity) for each in brokers) if is_known else now < self._identify_at:
            return
        self._identify_at = now + IDENTIFY_S
        with suppress(Transient):
            self._identity = self.servers.identity()

    def refused(self) -> Mapping[str, RelatumError]:
        """The recorded streams that are left out where none is named, and why, as they are known now."""
        now = time.monotonic()
        unusable = {stream: error for stream, (error, until) in self._unusable.items() if now < until}
        others = {stream: another_broker(stream, each, self._identity) for stream, each in self._others[1].items()}
        return unusable | others

    def leaves_out(self, names: Sequence[str] | None) -> tuple[UnreadableStream, ...]:
        """The same as an answer names them: none where streams are named."""
        refused = {} if names is not None else self.refused()
        return tuple(UnreadableStream(stream, str(error)) for stream, error in sorted(refused.items()))

    def why_left_out(self, stream: UnreadableStream) -> RelatumError:
        """The error of a stream that an answer leaves out, for one that would leave out all."""
        return self.refused().get(stream.stream) or AccessRefused(stream.reason, stream=stream.stream)

    def leave_out(self, error: StreamReplaced) -> bool:
        """Leave out, for a while, what is not the stream that was recorded; False where it was left out already."""
        until = time.monotonic() + UNUSABLE_S
        refused = self.refused()
        new = {each.stream: (each, until) for each in (error, *error.also) if each.stream not in refused}
        self._unusable = self._unusable | new
        return bool(new)

    def recorded(self, names: Sequence[str] | None, found_in: Iterable[str] = ()) -> tuple[str, ...]:
        """The names of the recorded streams meant, in order, by the snapshot in hand: without a statement.

        `found_in`: Streams that have a place among them whatever the snapshot says: messages were found there.
        """
        snapshot = self._snapshot or self._current()
        if names is None:
            refused = self.refused()
            streams = tuple(each for each in snapshot.streams if each not in refused) if refused else snapshot.streams
        elif len(names) == 1:
            streams = snapshot.by_name.get(names[0], ())
        else:
            streams = tuple(sorted({stream for name in names for stream in snapshot.by_name.get(name, ())}))
        more = {stream for stream in found_in if stream not in snapshot.by_name}
        return tuple(sorted((*streams, *more))) if more else streams

    def nothing_recorded(self, gone: Sequence[str] = ()) -> NoReturn:
        """Say that no stream is there of which anything could be known, once the broker was reached."""
        self.servers.reach()
        others = self.servers.rows(_OTHER_VHOSTS, {"vhost": self.vhost})
        if gone:
            what = f"all {len(gone)} recorded streams of the virtual host {self.vhost!r} are gone from the broker"
        else:
            what = f"no stream of the virtual host {self.vhost!r} is recorded"
        told = ", ".join(f"{count} of {vhost!r}" for vhost, count in others)
        raise NothingRecorded(
            f"{what}, so nobody can say what there is or is not: let something record (`relatum record STREAM…`, or "
            "relatum.intercept(…, database=…) in the publisher), or name the streams to look in and ask for "
            "completeness" + (f"; recorded are streams of other virtual hosts: {told}" if others else ""),
            vhost=self.vhost,
        )

    def streams(self, names: Sequence[str] | None) -> list[PresentStream]:
        """The recorded streams of those names and super streams, or all, as the database has them now."""
        count = None if names is None else len(names)
        rows = self.servers.rows(present_streams(count), {"vhost": self.vhost} | named(names))
        refused = self.refused() if names is None else ()
        return [PresentStream(*row) for row in rows if row[1] not in refused]


def _names(recorded: Iterable[PresentStream]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """The streams' names in order; and for each name of a stream or super stream those it stands for."""
    by_name: dict[str, list[str]] = defaultdict(list)
    streams = sorted(recorded, key=lambda stream: stream.name)
    for stream in streams:
        for name in {stream.name, stream.super_stream} - {None}:
            by_name[str(name)].append(stream.name)
    return tuple(stream.name for stream in streams), {name: tuple(held) for name, held in by_name.items()}


def replaced(stream: str, offset: int) -> StreamReplaced:
    """The error for a stream that is not the one that was recorded."""
    return StreamReplaced(
        f"the stream {stream!r} is not the one that was recorded: at offset {offset} is something else, or nothing. It "
        "was declared again, or lost its tail; a recorder puts that right",
        stream=stream,
        offset=offset,
    )


def in_partition_order(name: str) -> tuple[int, str]:
    """A sort key that puts `orders-2` before `orders-10`."""
    return len(name), name
