"""Finding the message that another one names as its predecessor: where it lies, and which affinity set it is in."""

import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any, Final, NamedTuple, NoReturn

import sqlalchemy as sa

from relatum.errors import NotFound, PredecessorNotFound
from relatum.ids import MessageId
from relatum.keys import InvalidValue, KeyDefinition
from relatum.reading import Message, StreamReader
from relatum.store.catalog import key_definitions
from relatum.store.parts import may_hold_values
from relatum.store.tables import relationships, streams
from relatum.store.translation import translated_errors

SOURCE: Final = ("property:message_id",)
"""The sources of the key by which messages are found under their `message_id`."""

_SAME_ID_MAX: Final = 16
"""Messages of one id that are looked at, newest first: rows can outlive what they were recorded of."""


class Found(NamedTuple):
    """Where a message is, or is to go.

    Attributes:
        name: Its affinity set; None for none.
        stream: Its partition; None where that is for its set to say.
    """

    name: str | None
    stream: str | None


class Recent:
    """The messages that were published last, by their `message_id`. Threads may share it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._found: OrderedDict[str, Found] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def add(self, message_id: str, found: Found) -> None:
        """Remember where a message went."""
        with self._lock:
            self._found[message_id] = found
            self._found.move_to_end(message_id)
            if len(self._found) > self._most:
                self._found.popitem(last=False)

    def get(self, message_id: str) -> Found | None:
        """Where a message went; None where that is not remembered."""
        with self._lock:
            found = self._found.get(message_id)
            if found is not None:
                self._found.move_to_end(message_id)
            return found


def place_in(predecessor: str, partitions: Collection[str]) -> MessageId | None:
    """The place that "stream:offset" names; None where it is no place in one of these partitions, but an id.

    An id may have colons, too: only what stands before the last one decides.
    """
    stream, separator, offset = predecessor.rpartition(":")
    if not separator or stream not in partitions or not (offset.isascii() and offset.isdecimal()):
        return None
    return MessageId(stream, int(offset))


def read_predecessor(predecessor: str, place: MessageId, header: str, reader: StreamReader) -> Found:
    """The predecessor at a place.

    Raises:
        PredecessorNotFound: Nothing lies there.
    """
    try:
        return _found(reader.read(*place), header)
    except NotFound as error:
        raise PredecessorNotFound(
            f"no predecessor lies at {predecessor}: {error}; nothing was sent", predecessor=predecessor
        ) from error


def find_predecessor(
    predecessor: str, partitions: Collection[str], header: str, *, engine: sa.Engine, vhost: str, reader: StreamReader
) -> Found:
    """The newest message of a `message_id`, by the relationship table.

    Raises:
        PredecessorNotFound: No key is taken from `message_id`, or no message of that id is recorded.
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    with translated_errors(), engine.connect() as connection:
        found = [key for key in key_definitions(connection) if tuple(key.sources) == SOURCE]
        if not found:
            _refuse(
                predecessor,
                "this router has not published it, and no key is taken from the property message_id "
                "(`relatum keys add message_id --source property:message_id`)",
            )
        places = [place for key in found for place in _recorded(connection, key, predecessor, partitions, vhost)]
    for message in reader.read_many(places):
        if isinstance(message, Message) and message.properties.message_id == predecessor:
            return _found(message, header)
    _refuse(predecessor, "this router has not published it, and it is not recorded, or not yet")


def recorded_places(key_id: int, value: str, partitions: Collection[str], vhost: str) -> sa.Select[Any]:
    """The statement that gives where a key's value was recorded, newest first."""
    return (
        sa.select(streams.c.name, relationships.c.stream_offset)
        .join_from(relationships, streams, relationships.c.stream_id == streams.c.stream_id)
        .where(
            relationships.c.key_id == key_id,
            relationships.c.value == value,
            may_hold_values(key_id, value, value),
            streams.c.vhost == vhost,
            streams.c.name.in_(partitions),
            streams.c.replaced_at.is_(None),
        )
        .order_by(relationships.c.time_us.desc().nulls_last(), relationships.c.stream_offset.desc())
        .limit(_SAME_ID_MAX)
    )


def _recorded(
    connection: sa.Connection, key: KeyDefinition, predecessor: str, partitions: Collection[str], vhost: str
) -> list[MessageId]:
    try:
        value = key.canonical_query(predecessor)
    except InvalidValue:
        # A key of numbers: an id that is none was never recorded under it.
        return []
    rows = connection.execute(recorded_places(key.key_id, value, partitions, vhost))
    return [MessageId(stream, offset) for stream, offset in rows]


def _found(message: Message, header: str) -> Found:
    name = message.headers.get(header)
    return Found(name if isinstance(name, str) else None, message.stream)


def _refuse(predecessor: str, why: str) -> NoReturn:
    raise PredecessorNotFound(
        f"the predecessor {predecessor[:80]!r} is not known: {why}; nothing was sent", predecessor=predecessor
    )
