"""Errors of what was found: not there, not as expected, or bytes that are broken. See `relatum.errors`."""

from relatum.errors._root import RelatumError


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
