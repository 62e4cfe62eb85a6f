"""The errors that Relatum raises, grouped by what a caller can do about them.

Fields say what failed (`stream`, `offset`, `key`, `reason`). No message contains a payload, a credential or a URL.
All errors can be pickled.
"""

from collections.abc import Callable
from typing import Any


class RelatumError(Exception):
    """Base class of all errors that Relatum raises.

    Args:
        message: What failed, with which value, and what to do next.
        fields: Values that a program can branch on; each becomes an attribute.
    """

    def __init__(self, message: str = "", /, **fields: Any) -> None:
        super().__init__(message)
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message and the fields: `Exception` itself would drop the fields."""
        return (type(self), self.args, self.__dict__)


# --- configuration and installation: change them ----------------------------------------------------------------------


class ConfigurationError(RelatumError):
    """A URL, an option or the installation is wrong; nothing was sent or written."""


class UsedAfterFork(ConfigurationError):
    """An object created before a fork was used in the child process. Create one in each process."""


class UsedAfterClose(ConfigurationError):
    """An object was used after it was closed; nothing was sent or written."""


class SchemaMissing(ConfigurationError):
    """The database has no schema `relatum`, or an older one: run `relatum migrate`."""


class NothingRecorded(ConfigurationError):
    """No stream of the virtual host is recorded, or all recorded streams are gone (field `vhost`). Record a stream."""

    vhost: str


class AnotherBroker(ConfigurationError):
    """The stream was recorded from another broker (`recorded`) than this one (`connected`); nothing was written."""

    stream: str
    recorded: str
    connected: str


class TlsRefused(ConfigurationError):
    """A TLS connection to a broker failed: a certificate or the handshake was refused, or its port has no TLS."""


class ServerStartFailed(ConfigurationError):
    """A private server did not start. If it exited or gave no answer, the message ends with its last output."""


class TimeNotRecorded(ConfigurationError):
    """The lookup needs the times of messages, which are not recorded for the stream (field `stream`)."""

    stream: str


# --- arguments: change the call; nothing was sent or written ----------------------------------------------------------


class InvalidInput(RelatumError, ValueError):
    """An argument is invalid; nothing was sent or written."""


class InvalidRelationshipKey(InvalidInput):
    """A key's value cannot be recorded (fields `key`, `reason`); nothing was sent."""

    key: str
    reason: str


class InvalidKeyDefinition(InvalidInput):
    """A key definition is invalid (field `key`); nothing was written."""

    key: str


class InvalidGroup(InvalidInput):
    """A message group has ended, or its header, id, number or option is invalid (field `reason`); nothing was sent."""

    reason: str


class HeadersRefused(InvalidInput):
    """Headers are too deep, too many, too large or of a wrong type (field `reason`); nothing was sent."""

    reason: str


# --- not found --------------------------------------------------------------------------------------------------------


class NotFound(RelatumError, LookupError):
    """No object has the given name, id or offset."""


class StreamNotFound(NotFound):
    """There is no such stream (field `stream`)."""

    stream: str


class NotAStream(NotFound):
    """The name belongs to a queue of another kind (field `stream`)."""

    stream: str


class OffsetNotFound(NotFound):
    """No message has the offset, which is past the end or used by the broker itself (fields `stream`, `offset`).

    Fields: `is_proven` (True: the stream's leader reported it; False: another node did, which may lag behind); `last`
    (the stream's last offset; None if the stream is empty).
    """

    stream: str
    offset: int
    last: int | None = None
    is_proven: bool = False


class OffsetExpired(OffsetNotFound):
    """Retention has dropped the message (fields `stream`, `offset`; `first`: the first retained offset)."""

    first: int


class KeyNotDefined(NotFound):
    """No key of this name is defined (field `key`)."""

    key: str


class SuperStreamNotFound(NotFound):
    """There is no such super stream (field `super_stream`)."""

    super_stream: str


class PlacementNotFound(NotFound):
    """The serialization context or affinity set has no placement (field `name`)."""

    name: str


class PredecessorNotFound(NotFound):
    """The message's predecessor, and so its affinity set, is unknown (field `predecessor`); nothing was sent."""

    predecessor: str


# --- permissions ------------------------------------------------------------------------------------------------------


class AccessRefused(RelatumError):
    """The broker or the database refused the login, or the user lacks a permission."""


# --- the state differs from the expected one; nothing was written -----------------------------------------------------


class Conflict(RelatumError):
    """The state differs from the expected one; nothing was written."""


class StreamReplaced(Conflict):
    """The stream was declared again, or lost its last messages (fields `stream`; `also`: other streams' errors)."""

    stream: str
    also: "tuple[StreamReplaced, ...]" = ()


class CoverageConflict(Conflict):
    """The coverage changed, or the stream was redeclared or forgotten (field `stream`); its rows were not written."""

    stream: str


class KeyDefinitionConflict(Conflict):
    """The key is in force with another definition, or is masked and cannot be removed (field `key`)."""

    key: str


class IncompleteGroup(Conflict):
    """A message group was ended before all of its messages were published.

    Fields: `group_id`; `missing` (ranges of sequence numbers: first, last); `last_sequence` (None: no last message).
    """

    group_id: str
    missing: tuple[tuple[int, int], ...]
    last_sequence: int | None


class GroupConflict(Conflict):
    """The messages of a group are inconsistent (fields `group_id`, `anomaly`: one of `relatum.membership.Anomaly`)."""

    group_id: str
    anomaly: str


class ClaimLost(Conflict):
    """The member's lease on a group expired, or it released the group (field `group_id`); nothing was written."""

    group_id: str


class SuperStreamConflict(Conflict):
    """The super stream's partitions or context header are not the expected ones (fields `super_stream`, `reason`)."""

    super_stream: str
    reason: str


class MoveConflict(Conflict):
    """A move cannot begin or continue (fields `move_id` and `state`: those of the open or ended move)."""

    move_id: int
    state: str


class PartitionInUse(Conflict):
    """A partition cannot be retired: contexts, moves or consumers still need it (fields `stream`, `reason`)."""

    stream: str
    reason: str


class StreamInUse(Conflict):
    """A stream cannot be forgotten: it is being recorded, or other rows refer to it (fields `stream`, `reason`)."""

    stream: str
    reason: str


class PartitionLost(Conflict):
    """The member's lease on a partition expired, and another member took over (field `stream`); nothing was written."""

    stream: str


# --- transient: the call is safe to repeat ----------------------------------------------------------------------------


class Transient(RelatumError):
    """A transient failure; the call is safe to repeat."""


class BrokerUnavailable(Transient):
    """The broker cannot be reached, or does not answer."""


class ConnectionLost(BrokerUnavailable):
    """The connection to the broker ended while in use."""


class StreamUnavailable(BrokerUnavailable):
    """The stream cannot be read now: it moved to another node, is starting, or was deleted (field `stream`)."""

    stream: str


class StreamNotHere(StreamUnavailable):
    """No replica of the stream on a reachable node answers (fields `stream`, `offset`: None if none was requested)."""

    offset: int | None = None


class DatabaseUnavailable(Transient):
    """PostgreSQL does not answer, or cannot run the statement now.

    Field `reason`: `read_only` (a standby, or default_transaction_read_only; nothing was written), `target` (no host
    matches target_session_attrs), `disk_full`, `connections` (too many), `pool` (no pooled connection became free),
    `timeout`, `starting`, `stopping`, `name` (the host's name does not resolve), or None: no answer.
    """

    reason: str | None = None


class ReadTimeout(Transient):
    """The broker did not answer, or a stream was not read, within the time limit."""


class ConnectionsInUse(Transient):
    """All connections of a reader are in use (fields `limit`: `broker_connections_max`; `waiting`: queued calls)."""

    limit: int
    waiting: int


class NotRecordedInTime(Transient):
    """The message is confirmed, but was not recorded in time. Wait again.

    Fields: `found` (the places known so far), `in_stream` (True; None: it may be in queues only).
    """

    found: tuple[Any, ...] = ()
    in_stream: bool | None = True


class NotFinishedInTime(Transient):
    """A message's outcome was not final in time (field `outcome`: the present outcome). Wait again."""

    outcome: Any


class ContextMoving(Transient):
    """The move of the message's context did not end in time (fields `context`, `move_id`); nothing was sent."""

    context: str
    move_id: int


class TooManyOpenSets(Transient):
    """No affinity set can be opened until others are closed (fields `open_sets`, `open_sets_max`); nothing was sent."""

    open_sets: int
    open_sets_max: int


# --- publishing -------------------------------------------------------------------------------------------------------


class PublishError(RelatumError):
    """A publish was not confirmed (field `in_stream`: False, or None: unknown)."""

    in_stream: bool | None = None


class PublishRejected(PublishError):
    """The broker did not store the message in any stream."""

    in_stream: bool | None = False


class PublishNacked(PublishRejected):
    """The broker refused the message (`basic.nack`)."""


class PublishUnroutable(PublishRejected):
    """No queue or stream is bound to receive the message (`basic.return`)."""


class PublishOutcomeUnknown(PublishError):
    """The connection was lost, or time ran out, after sending: the message may or may not be in the stream.

    `settle(timeout_s)` finds out by reading the streams: it returns the message's places, or raises `PublishRejected`
    (no stream has the message, and it cannot arrive any more) or this error again. Await it if you awaited the publish.
    `settle` is not pickled: it uses connections of the process that published.
    """

    settle: Callable[..., Any]

    def __reduce__(self) -> tuple[Any, ...]:
        kind, args, fields = super().__reduce__()
        return kind, args, {name: value for name, value in fields.items() if name != "settle"}


# --- corrupt data -----------------------------------------------------------------------------------------------------


class DataError(RelatumError):
    """Data are corrupt or in an unknown format."""


class ProtocolError(DataError):
    """A peer violated the stream protocol."""


class ChunkCorrupt(DataError):
    """A chunk's checksum or lengths are wrong (fields `stream`, `offset`, if known)."""


class UndecodableMessage(DataError):
    """A message is not valid AMQP 1.0, has more sections or values than Relatum decodes, or cannot be unpacked."""


class RowRefused(DataError):
    """PostgreSQL refuses a value or a row, and would refuse it again (field `sqlstate`); nothing was written."""

    sqlstate: str | None
