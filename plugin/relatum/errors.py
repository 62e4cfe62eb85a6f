"""Everything Relatum raises, grouped by what a caller can do about it; the classes are in the order of the tree.

Fields say what failed (`stream`, `offset`, `key`, `reason`); no message holds a payload, a credential or a URL.
All errors can be pickled.
"""

from collections.abc import Callable
from typing import Any


class RelatumError(Exception):
    """The root of all errors of Relatum.

    Args:
        message: What failed, with which value, and what to do next.
        fields: Facts a program can branch on; each becomes an attribute.
    """

    def __init__(self, message: str = "", /, **fields: Any) -> None:
        super().__init__(message)
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the message, then from the fields: keyword arguments survive pickling."""
        return (type(self), self.args, self.__dict__)


# --- what is set up or installed: change it ---------------------------------------------------------------------------


class ConfigurationError(RelatumError):
    """A URL, an option or an installation is not as it must be; nothing was sent or written."""


class UsedAfterFork(ConfigurationError):
    """An object that works in one process was made before a fork and used in the child. Make one in each process."""


class UsedAfterClose(ConfigurationError):
    """An object was used after it was closed; nothing was sent or written."""


class SchemaMissing(ConfigurationError):
    """The database has no schema `relatum`, or an older one: run `relatum migrate`."""


class NothingRecorded(ConfigurationError):
    """A lookup in all recorded streams of a virtual host (field `vhost`) that has none: nothing can be known."""

    vhost: str


class AnotherBroker(ConfigurationError):
    """A stream of that name was recorded from another broker (`recorded`, not `connected`); nothing was written."""

    stream: str
    recorded: str
    connected: str


class TlsRefused(ConfigurationError):
    """No TLS with a broker: either side refuses a certificate, or does not speak TLS."""


class ServerStartFailed(ConfigurationError):
    """A private server did not start; the message ends with the server's own last lines."""


class TimeNotRecorded(ConfigurationError):
    """A lookup by time asked for a stream whose times are switched off (field `stream`)."""

    stream: str


# --- the call: change it; nothing was sent or written -----------------------------------------------------------------


class InvalidInput(RelatumError, ValueError):
    """The call is wrong; nothing was sent or written."""


class InvalidRelationshipKey(InvalidInput):
    """A key's value cannot be recorded (fields `key`, `reason`); nothing was sent."""

    key: str
    reason: str


class InvalidKeyDefinition(InvalidInput):
    """A key definition cannot be one (field `key`); nothing was written."""

    key: str


class InvalidGroup(InvalidInput):
    """Headers, an id, a number or a call that no message group can have (field `reason`); nothing was sent."""

    reason: str


class HeadersRefused(InvalidInput):
    """Headers that cannot be sent safely: too deep, many or large, or for no stream (field `reason`); not sent."""

    reason: str


# --- what was named and is not there ----------------------------------------------------------------------------------


class NotFound(RelatumError, LookupError):
    """What was named does not exist."""


class StreamNotFound(NotFound):
    """There is no such stream (field `stream`)."""

    stream: str


class NotAStream(NotFound):
    """The name belongs to a queue of another kind (field `stream`)."""

    stream: str


class OffsetNotFound(NotFound):
    """No message is at the offset (fields `stream`, `offset`): past the end, or an offset the broker used itself.

    Fields: `is_proven` (True if the stream's leader says so; False: one node, which may lag behind); `last` (the
    stream's last offset, None for an empty stream).
    """

    stream: str
    offset: int
    last: int | None = None
    is_proven: bool = False


class OffsetExpired(OffsetNotFound):
    """Retention has dropped the offset (fields `stream`, `offset`, `first`: the first one retained)."""

    first: int


class KeyNotDefined(NotFound):
    """No key definition has that name (field `key`)."""

    key: str


class SuperStreamNotFound(NotFound):
    """There is no such super stream (field `super_stream`)."""

    super_stream: str


class PlacementNotFound(NotFound):
    """No serialization context, or affinity set, of that name is placed (field `name`)."""

    name: str


class PredecessorNotFound(NotFound):
    """The message whose affinity set is to be joined is not known (field `predecessor`); nothing was sent."""

    predecessor: str


# --- permissions ------------------------------------------------------------------------------------------------------


class AccessRefused(RelatumError):
    """The broker or the database refuses this user."""


# --- what was found is not what was expected; nothing was written -----------------------------------------------------


class Conflict(RelatumError):
    """What was found is not what was expected; nothing was written."""


class StreamReplaced(Conflict):
    """The stream was declared again, or lost its tail (field `stream`; `also`: the same errors of other streams)."""

    stream: str
    also: "tuple[StreamReplaced, ...]" = ()


class CoverageConflict(Conflict):
    """Another recorder moved the coverage first (field `stream`); this batch was not written."""

    stream: str


class KeyDefinitionConflict(Conflict):
    """A definition of that name with another source or type is in force (field `key`)."""

    key: str


class IncompleteGroup(Conflict):
    """A message group ended while messages of it are missing.

    Fields: `group_id`; `missing` (ranges of sequence numbers: first, last); `last_sequence` (None without a last one).
    """

    group_id: str
    missing: tuple[tuple[int, int], ...]
    last_sequence: int | None


class GroupConflict(Conflict):
    """A message group contradicts itself (fields `group_id`, `anomaly`: one of `relatum.membership.Anomaly`)."""

    group_id: str
    anomaly: str


class ClaimLost(Conflict):
    """The member's lease on a group ran out, or it gave the group back (field `group_id`); nothing was written."""

    group_id: str


class SuperStreamConflict(Conflict):
    """A super stream has other partitions, or another header of contexts (fields `super_stream`, `reason`)."""

    super_stream: str
    reason: str


class MoveConflict(Conflict):
    """A move cannot begin or go on (fields `move_id`, `state`: of a move of the same context, or of one that ended)."""

    move_id: int
    state: str


class PartitionInUse(Conflict):
    """A partition cannot be retired: contexts, moves or consumers still need it (fields `stream`, `reason`)."""

    stream: str
    reason: str


class StreamInUse(Conflict):
    """A stream cannot be forgotten: it is recorded, or others keep what refers to it (fields `stream`, `reason`)."""

    stream: str
    reason: str


class PartitionLost(Conflict):
    """The member's lease on a partition ran out, and another member has it (field `stream`); nothing was written."""

    stream: str


# --- what passes: the call is safe to repeat --------------------------------------------------------------------------


class Transient(RelatumError):
    """Something that passes; the call is safe to repeat."""


class BrokerUnavailable(Transient):
    """The broker does not answer."""


class ConnectionLost(BrokerUnavailable):
    """The connection to the broker ended while in use."""


class StreamUnavailable(BrokerUnavailable):
    """The stream moves to another node, or was deleted, under a reader (field `stream`)."""

    stream: str


class StreamNotHere(StreamUnavailable):
    """No node that can be reached from here has a replica of the stream that answers (field `stream`)."""

    offset: int


class DatabaseUnavailable(Transient):
    """PostgreSQL does not answer, or takes nothing now.

    Field `reason`: `read_only` (a standby, or default_transaction_read_only; nothing was written), `target` (no host
    matches target_session_attrs), `disk_full`, `connections` (too many), `pool` (none of ours became free), `timeout`,
    `starting`, `stopping`, `name` (the host's name does not resolve), or None: no answer.
    """

    reason: str | None = None


class ReadTimeout(Transient):
    """No answer came in time."""


class ConnectionsInUse(Transient):
    """All connections of a reader are in use (`limit`: `broker_connections_max`; `waiting`: calls that wait)."""

    limit: int
    waiting: int


class NotRecordedInTime(Transient):
    """The message is confirmed, but its rows were not there in time. Wait again.

    Fields: `found` (the places known so far), `in_stream` (True, or None if it may have gone to other queues only).
    """

    found: tuple[Any, ...] = ()
    in_stream: bool | None = True


class NotFinishedInTime(Transient):
    """The outcome of a message was not final in time (field `outcome`: what is known so far). Wait again."""

    outcome: Any


class ContextMoving(Transient):
    """A move of the message's context did not end in time (fields `context`, `move_id`); nothing was sent."""

    context: str
    move_id: int


class TooManyOpenSets(Transient):
    """No affinity set can be opened until others are closed (fields `open_sets`, `open_sets_max`); nothing was sent."""

    open_sets: int
    open_sets_max: int


# --- messages that were to be published -------------------------------------------------------------------------------


class PublishError(RelatumError):
    """A publish did not end as confirmed (field `in_stream`: False, or None where it is not known)."""

    in_stream: bool | None = None


class PublishRejected(PublishError):
    """The broker took the message into no stream."""

    in_stream: bool | None = False


class PublishNacked(PublishRejected):
    """The broker refused the message (`basic.nack`)."""


class PublishUnroutable(PublishRejected):
    """No queue or stream is bound for the message (`basic.return`)."""


class PublishOutcomeUnknown(PublishError):
    """The connection was lost, or time ran out, after sending: the message may or may not be in the stream.

    `settle(timeout_s)` finds out by reading the streams: it returns the message's places, or raises `PublishRejected`
    (it is nowhere and cannot arrive any more) or this error again. Await it if the publish was awaited. It is not
    pickled: it belongs to the process that published.
    """

    settle: Callable[..., Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild without `settle`: it holds connections of this process."""
        kind, args, fields = super().__reduce__()
        return kind, args, {name: value for name, value in fields.items() if name != "settle"}


# --- bytes that are broken --------------------------------------------------------------------------------------------


class DataError(RelatumError):
    """Bytes are not what they should be."""


class ProtocolError(DataError):
    """A peer broke the stream protocol."""


class ChunkCorrupt(DataError):
    """A chunk's checksum or lengths are wrong (fields `stream`, `offset` where known)."""


class UndecodableMessage(DataError):
    """A message is not AMQP 1.0, or is compressed by a codec that is not installed."""


class RowRefused(DataError):
    """PostgreSQL refuses a value or a row, and always would (field `sqlstate`); nothing was written."""

    sqlstate: str | None
