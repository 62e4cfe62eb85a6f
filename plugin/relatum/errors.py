"""Everything Relatum raises, branched by what a caller can do about it; the classes stand in the order of the tree.

Fields say what failed (`stream`, `offset`, `key`, `reason`); no message holds a payload, a credential or a URL.
All of them can be pickled.
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
    """An object that works in one process was made before a fork and used in the child; nothing was sent or written.

    Make one in each process: behind the fork, in a pre-fork server's hook for new workers.
    """


class UsedAfterClose(ConfigurationError):
    """An object was used after it was closed; nothing was sent or written. Make another one, or close it later."""


class SchemaMissing(ConfigurationError):
    """The database has no schema `relatum`, or an older one: run `relatum migrate`."""


class NothingRecorded(ConfigurationError):
    """A look-up among all recorded streams of a virtual host (field `vhost`) that has none: nothing can be known."""

    vhost: str


class AnotherBroker(ConfigurationError):
    """A stream of that name was recorded from another broker (field `stream`); nothing was written.

    Fields `recorded` and `connected`: the two brokers, in words.
    """

    stream: str
    recorded: str
    connected: str


class TlsRefused(ConfigurationError):
    """TLS with a broker cannot be: a certificate is refused, by either side, or one of them does not speak TLS."""


class ServerStartFailed(ConfigurationError):
    """A private server did not start; the message ends with the server's own last lines."""


class TimeNotRecorded(ConfigurationError):
    """A look-up by time asked for a stream whose times are switched off (field `stream`)."""

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
    """Headers or a call that cannot make a message one of a group, or an id or a number no group has (field `reason`).

    Where it was about a message to be published, nothing was sent.

    The reasons are those of `relatum.membership.GroupFault`.
    """

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
    """No message lies at the offset (fields `stream`, `offset`): past the end, or an offset the broker used itself.

    Field `is_proven`: True where the stream's leader says so; False is one node's word, which may lag behind. Field
    `last`: the stream's last offset, None where it is empty.
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
    """The stream is not the one that was recorded: declared again, or its tail was lost (field `stream`).

    Field `also`: the errors of other streams that were found to be others at the same time.
    """

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

    Fields: `group_id`; `missing` (ranges of sequence numbers, each with its first and its last); `last_sequence` (the
    last message's number, None where it is not there).
    """

    group_id: str
    missing: tuple[tuple[int, int], ...]
    last_sequence: int | None


class GroupConflict(Conflict):
    """A message group contradicts itself (fields `group_id`, `anomaly`: one of `relatum.membership.Anomaly`)."""

    group_id: str
    anomaly: str


class ClaimLost(Conflict):
    """The group is not this member's any more (field `group_id`); nothing was written.

    Its lease had run out and another member of the consumer has it or is done with it, or it was given back.
    """

    group_id: str


class SuperStreamConflict(Conflict):
    """A super stream is not as it was said to be: other partitions, or another header that names contexts.

    Fields: `super_stream`, `reason`.
    """

    super_stream: str
    reason: str


class MoveConflict(Conflict):
    """A move of contexts cannot begin, or cannot go on as asked: one of them moves already, or the move has ended.

    Fields: `move_id` (the move in the way), `state` (that move's).
    """

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
    """The partition is not this member's any more (field `stream`); nothing was written.

    Its lease had run out, and another member of the serial consumer has it. What was not acknowledged is delivered to
    that one.
    """

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
    """No node that can be reached from here has a replica of the stream that answers (field `stream`).

    It moves, or its nodes are down or advertise names that cannot be reached from here.
    """

    offset: int


class DatabaseUnavailable(Transient):
    """PostgreSQL does not answer, or takes nothing now.

    Field `reason`: `read_only` (a standby, or default_transaction_read_only; nothing was written), `target` (no host is
    as target_session_attrs asks), `disk_full`, `connections` (too many are open), `pool` (none of ours became free),
    `timeout` (no answer within a time-out, which the message names), `starting`, `stopping`, `name` (the host's name
    does not resolve), or None: no answer.
    """

    reason: str | None = None


class ReadTimeout(Transient):
    """No answer came in time."""


class ConnectionsInUse(Transient):
    """All connections that a reader may have to the broker are in use, and none became free in time; nothing was asked.

    Fields: `limit` (the option `broker_connections_max`), `waiting` (calls that waited for one, this one included).
    """

    limit: int
    waiting: int


class NotRecordedInTime(Transient):
    """The message is confirmed, but its rows were not there in time; waiting again is fine.

    Fields: `found` (the places known so far), `in_stream` (True, or None where it may have gone to other queues only).
    """

    found: tuple[Any, ...] = ()
    in_stream: bool | None = True


class NotFinishedInTime(Transient):
    """The outcome of a message was not final in time; waiting again is fine.

    Field: `outcome` (what is known so far, "unknown" where no collector has taken the message).
    """

    outcome: Any


class ContextMoving(Transient):
    """A move of the message's context did not end in time; nothing was sent.

    Fields: `context`, `move_id`. Whoever finds a move that nobody goes on with can complete or abort it.
    """

    context: str
    move_id: int


class TooManyOpenSets(Transient):
    """No further affinity set can be opened until others are closed; nothing was sent.

    Fields: `open_sets`, `open_sets_max`.
    """

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
    """Connection or time was lost after sending: the message may or may not be in the stream.

    `settle(timeout_s)` finds out by reading the streams: it returns the message's places, or raises `PublishRejected`
    (it is nowhere and cannot arrive any more) or this error again. It is to be awaited where the publish was. After
    pickling it is gone: it belongs to the process that published.
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
    """PostgreSQL refuses a value or a row, and would each time (field `sqlstate`); nothing was written.

    A text too long for an index or without a place in the database's encoding, a number out of range, a constraint.
    """

    sqlstate: str | None
