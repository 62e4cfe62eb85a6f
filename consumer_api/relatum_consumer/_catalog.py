"""Key definitions and stream names, kept for a second; and which values of which keys a look-up means."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from relatum.errors import InvalidInput, InvalidRelationshipKey, KeyNotDefined
from relatum.keys import InvalidValue, KeyDefinition
from relatum.reading import Message
from relatum_consumer import _statements as statements
from relatum_consumer._limits import CATALOG_AGE_S
from relatum_consumer._requests import Bounds, Partitions, Select, Steps


class PresentStream(NamedTuple):
    """One recorded stream in its present generation."""

    stream_id: int
    name: str
    super_stream: str | None
    record_time: bool


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
        return value_of(self.definition, message) == self.value


@dataclass(frozen=True, slots=True)
class _Snapshot:
    definitions: Mapping[str, KeyDefinition]
    names: frozenset[str]
    read_at: float


def value_of(definition: KeyDefinition, message: Message) -> str | None:
    """The key's canonical value in a message; None where it has none, or one that cannot be recorded."""
    try:
        return definition.value_of(message.headers, partial(getattr, message.properties))
    except InvalidValue:
        return None


class Catalog:
    """What the database says of keys and streams. Threads may share it: a snapshot is replaced as a whole.

    A stale snapshot cannot make an answer wrong, only a second old: key ids are never used again, every message is
    checked against the definition that was used, and the streams are looked up in the statements themselves.
    """

    def __init__(self, vhost: str) -> None:
        self.vhost = vhost
        self._snapshot: _Snapshot | None = None

    def forget(self) -> None:
        """Read anew at the next use."""
        self._snapshot = None

    def _current(self, *, fresh: bool = False) -> Steps[_Snapshot]:
        snapshot = self._snapshot
        now = time.monotonic()
        if snapshot is None or fresh or now - snapshot.read_at > CATALOG_AGE_S:
            keys = yield Select(statements.definitions(), {})
            streams = yield Select(statements.present_streams(None), {"vhost": self.vhost})
            self._snapshot = snapshot = _Snapshot(_definitions(keys), _names(streams), now)
        return snapshot

    def definition(self, key: str) -> Steps[KeyDefinition]:
        """A key's definition.

        Raises:
            KeyNotDefined: no key of that name is in force.
        """
        if not isinstance(key, str):
            raise InvalidInput(f"a key is asked for by its name, not by {type(key).__name__}")
        snapshot = yield from self._current()
        if key not in snapshot.definitions:
            snapshot = yield from self._current(fresh=True)
        try:
            return snapshot.definitions[key]
        except KeyError:
            raise KeyNotDefined(f"no key {key!r} is defined; see `relatum keys list`", key=key) from None

    def values_of(self, message: Message, keys: Sequence[str] | None) -> Steps[tuple[Wanted, ...]]:
        """The message's own values of the keys, or of every key defined where None; keys it has no value of left out.

        Raises:
            KeyNotDefined: no key of that name is in force.
        """
        if keys is None:
            snapshot = yield from self._current()
            definitions = list(snapshot.definitions.values())
        else:
            definitions = []
            for key in dict.fromkeys(keys):
                definitions.append((yield from self.definition(key)))
        found = ((definition, value_of(definition, message)) for definition in definitions)
        return tuple(Wanted(definition, value) for definition, value in found if value is not None)

    def value_sought(self, key: str, value: Any) -> Steps[Wanted]:
        """A value someone asks for.

        Raises:
            KeyNotDefined: no key of that name is in force.
            InvalidRelationshipKey: no message can carry that value.
        """
        definition = yield from self.definition(key)
        try:
            return Wanted(definition, definition.canonical_query(value))
        except InvalidValue as error:
            message = f"no message can carry this value of the key {key!r}: {error.reason}"
            raise InvalidRelationshipKey(message, key=key, reason=error.reason.value) from error

    def check_names(self, names: Sequence[str] | None) -> Steps[None]:
        """See that each name is a stream or super stream, recorded or not.

        Raises:
            StreamNotFound: neither the database nor the broker knows one.
        """
        if names is None:
            return
        snapshot = yield from self._current()
        if snapshot.names.issuperset(names):
            return
        snapshot = yield from self._current(fresh=True)
        for name in names:
            if name not in snapshot.names and not (yield Partitions(name)):
                yield Bounds(name)

    def streams(self, names: Sequence[str] | None) -> Steps[list[PresentStream]]:
        """The recorded streams of those names and super streams, or all, as the database has them now."""
        count = None if names is None else len(names)
        rows = yield Select(statements.present_streams(count), {"vhost": self.vhost} | statements.named(names))
        return [PresentStream(*row) for row in rows]


def _definitions(rows: Iterable[Sequence[Any]]) -> dict[str, KeyDefinition]:
    return {
        name: KeyDefinition(name, source=tuple(sources), type=key_type, since=since, key_id=key_id)
        for key_id, name, sources, key_type, since in rows
    }


def _names(rows: Iterable[Sequence[Any]]) -> frozenset[str]:
    streams = [PresentStream(*row) for row in rows]
    supers = {stream.super_stream for stream in streams if stream.super_stream is not None}
    return frozenset({stream.name for stream in streams} | supers)


def in_partition_order(name: str) -> tuple[int, str]:
    """A sort key that puts `orders-2` before `orders-10`."""
    return len(name), name
