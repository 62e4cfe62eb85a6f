"""Finds the affinity set of a message: the one its headers name, or its predecessor's."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple, NoReturn

import sqlalchemy as sa

from relatum.contexts._placements import check_name
from relatum.contexts._router_core import RouterCore
from relatum.errors import InvalidInput, NotFound, PredecessorNotFound
from relatum.headers import AFFINITY_LAST_HEADER, PREDECESSOR_HEADER
from relatum.ids import MessageId
from relatum.keys import InvalidValue, KeyDefinition
from relatum.reading import Message
from relatum.store.catalog import key_definitions
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum.store.translation import translated_errors

SOURCE: Final = ("property:message_id",)
"""The source of the key that finds messages by their `message_id`."""

_SAME_ID_MAX: Final = 16
"""How many messages with one id are read, newest first: rows can outlive their messages."""

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
    """What a message's headers ask for: a set, or the set of its predecessor."""

    name: str | None = None
    is_last: bool = False
    predecessor: str | None = None
    """A `message_id`, or "stream:offset"."""


NO_SET: Final = SetRequest()
"""The request of a message without a set: any partition."""


def set_request_of(headers: Mapping[str, Any] | None, header: str) -> SetRequest:
    """Parse the headers of a message; `InvalidInput` if they contradict each other."""
    if not headers:
        return NO_SET
    name, predecessor = headers.get(header), headers.get(PREDECESSOR_HEADER)
    # A header without a value counts as missing.
    is_last = headers.get(AFFINITY_LAST_HEADER)
    if is_last is None:
        is_last = False
    for value, named_by in ((name, header), (predecessor, PREDECESSOR_HEADER)):
        if value is not None:
            check_name(value, f"the header {named_by}", outcome="nothing was sent")
    if name is not None and predecessor is not None:
        why = f"a message names its affinity set ({header}) or a predecessor ({PREDECESSOR_HEADER}), not both"
    elif type(is_last) is not bool:
        why = f"the header {AFFINITY_LAST_HEADER} is True or False, not {type(is_last).__name__}"
    elif is_last and name is None and predecessor is None:
        why = f"the header {AFFINITY_LAST_HEADER} ends an affinity set, and this message is in none"
    else:
        return SetRequest(name, is_last, predecessor)
    raise InvalidInput(f"{why}; nothing was sent")


class Found(NamedTuple):
    """A message's set, if any, and its partition; None if the set determines it."""

    name: str | None
    stream: str | None


class Predecessors:
    """Finds predecessors: recent messages of this router in memory, others in the relationship table. Thread-safe."""

    def __init__(self, core: RouterCore, most: int) -> None:
        self._core = core
        self._most = most
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, Found] = OrderedDict()

    def published(self, found: Found, message_id: str | None) -> None:
        """Remember the set and partition of a message that has an id."""
        if not message_id:
            return
        with self._lock:
            self._recent[message_id] = found
            self._recent.move_to_end(message_id)
            if len(self._recent) > self._most:
                self._recent.popitem(last=False)

    def knows(self, request: SetRequest) -> bool:
        """Whether `place_of` needs no server."""
        return request.predecessor is None or self._remembered(request.predecessor) is not None

    def place_of(self, request: SetRequest) -> Found:
        """Return the set or partition that a request names. It may query both servers."""
        if request.predecessor is None:
            return Found(request.name, None)
        return self._remembered(request.predecessor) or self._find(request.predecessor)

    def _remembered(self, message_id: str) -> Found | None:
        with self._lock:
            if message_id in self._recent:
                self._recent.move_to_end(message_id)
            return self._recent.get(message_id)

    def _find(self, predecessor: str) -> Found:
        partitions = [row.stream for row in self._core.store.partitions()]
        place = place_in(predecessor, partitions)
        if place is None:
            return self._recorded(predecessor, partitions)
        try:
            return self._found(self._core.control_streams.reader().read(*place))
        except NotFound as error:
            raise PredecessorNotFound(
                f"no predecessor lies at {predecessor}: {error}; nothing was sent", predecessor=predecessor
            ) from error

    def _recorded(self, predecessor: str, partitions: Collection[str]) -> Found:
        """Find the newest message with a `message_id` in the relationship table."""
        given = {"vhost": self._core.control_streams.address.vhost, "partitions": partitions}
        with translated_errors(), self._core.store.database.engine.connect() as connection:
            keys = [key for key in key_definitions(connection) if tuple(key.sources) == SOURCE]
            if not keys:
                _refuse(
                    predecessor,
                    "this router has not published it, and no key is taken from the property message_id "
                    "(`relatum keys add message_id --source property:message_id`)",
                )
            places = [place for key in keys for place in _places(connection, key, predecessor, given)]
        for message in self._core.control_streams.reader().read_many(places):
            if isinstance(message, Message) and message.properties.message_id == predecessor:
                return self._found(message)
        _refuse(predecessor, "this router has not published it, and it is not recorded, or not yet")

    def _found(self, message: Message) -> Found:
        name = message.headers.get(self._core.options.header)
        return Found(name if isinstance(name, str) else None, message.stream)


def place_in(predecessor: str, partitions: Collection[str]) -> MessageId | None:
    """Parse "stream:offset"; None if it does not begin with one of these partitions, and so is an id.

    Ids may contain colons, too: the text before the last one decides.
    """
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
        # The key is an integer, and this id is not: it was never recorded.
        return []
    rows = connection.execute(RECORDED, {**given, "key_id": key.key_id, "value": value})
    return [MessageId(stream, offset) for stream, offset in rows]


def _refuse(predecessor: str, why: str) -> NoReturn:
    raise PredecessorNotFound(
        f"the predecessor {predecessor[:80]!r} is not known: {why}; nothing was sent", predecessor=predecessor
    )
