"""Everything Relatum raises, branched by what a caller can do about it.

```
RelatumError
├── ConfigurationError            change a URL, an option or an installation
│   ├── UsedAfterFork             made before a fork, used in the child: make one in each process
│   ├── UsedAfterClose            closed, and used again: make another one
│   ├── SchemaMissing             run `relatum migrate`
│   ├── NothingRecorded           no stream of the virtual host is recorded: let something record (field: vhost)
│   ├── AnotherBroker             a stream of that name was recorded from another broker (fields: stream, recorded,
│   │                             connected)
│   ├── TlsRefused                a certificate is refused, by either side, or one of them speaks no TLS
│   ├── ServerStartFailed         a private server of `relatum.local` did not start
│   └── TimeNotRecorded           times are switched off for that stream
├── InvalidInput                  the call is wrong; nothing was sent or written
│   ├── InvalidRelationshipKey    a key's value can't be one (fields: key, reason)
│   ├── InvalidKeyDefinition      a definition can't be one
│   ├── InvalidGroup              headers or a call that make no message of a group (field: reason)
│   └── HeadersRefused            headers too deep, too many or too large
├── NotFound
│   ├── StreamNotFound            there is no such stream (field: stream)
│   ├── NotAStream                the name is another kind of queue
│   ├── OffsetNotFound            no message at that offset
│   │   └── OffsetExpired         retention has dropped it
│   ├── KeyNotDefined             no definition of that name
│   ├── SuperStreamNotFound       there is no such super stream (field: super_stream)
│   ├── PlacementNotFound         no context or affinity set of that name (field: name)
│   └── PredecessorNotFound       the message whose affinity set is to be joined is not known (field: predecessor)
├── AccessRefused                 the broker or the database refuses this user
├── Conflict
│   ├── StreamReplaced            the stream is not the one that was recorded
│   ├── CoverageConflict          another recorder moved the coverage first; nothing was written
│   ├── KeyDefinitionConflict     a definition of that name says something else
│   ├── IncompleteGroup           messages of a group are missing (fields: group_id, missing, last_sequence)
│   ├── GroupConflict             a group contradicts itself (fields: group_id, anomaly)
│   ├── ClaimLost                 another member of the consumer has the group now (field: group_id)
│   ├── SuperStreamConflict       a super stream is not as it was said to be (fields: super_stream, reason)
│   ├── MoveConflict              a move cannot begin, or go on as asked (fields: move_id, state)
│   ├── PartitionInUse            a partition is still needed (fields: stream, reason)
│   ├── StreamInUse               a stream cannot be forgotten: it is still needed (fields: stream, reason)
│   └── PartitionLost             another member of the serial consumer has the partition now (field: stream)
├── Transient                     safe to retry
│   ├── BrokerUnavailable
│   │   ├── ConnectionLost        the connection ended while in use
│   │   └── StreamUnavailable     the stream moves, or was deleted, under a reader
│   │       └── StreamNotHere     no node that can be reached has a replica that answers (field: stream)
│   ├── DatabaseUnavailable       PostgreSQL is away, read-only or full (field: reason)
│   ├── ReadTimeout               no answer in time
│   ├── ConnectionsInUse          a reader has as many connections as it may (fields: limit, waiting)
│   ├── NotRecordedInTime         the message is in the stream, its rows are not there yet
│   ├── NotFinishedInTime         the message's outcome is not final yet (field: outcome)
│   ├── ContextMoving             a move of the context did not end in time; nothing was sent (fields: context, move_id)
│   └── TooManyOpenSets           no further affinity set can be opened now (fields: open_sets, open_sets_max)
├── PublishError
│   ├── PublishRejected           the broker took the message into no stream
│   │   ├── PublishNacked
│   │   └── PublishUnroutable
│   └── PublishOutcomeUnknown     connection or time lost after sending; settle it by reading
└── DataError                     bytes that are not what they should be
    ├── ProtocolError             a peer broke the stream protocol
    ├── ChunkCorrupt              a chunk's CRC or lengths are wrong
    ├── UndecodableMessage        not an AMQP message, or a codec that is not installed
    └── RowRefused                PostgreSQL cannot hold a value; nothing was written (field: sqlstate)
```

Fields say what failed (`stream`, `offset`, `key`, `reason`); no message holds a payload, a credential or a URL.
All of them can be pickled.
"""

from relatum.errors._calls import (
    AccessRefused,
    AnotherBroker,
    ConfigurationError,
    HeadersRefused,
    InvalidGroup,
    InvalidInput,
    InvalidKeyDefinition,
    InvalidRelationshipKey,
    NothingRecorded,
    SchemaMissing,
    ServerStartFailed,
    TimeNotRecorded,
    TlsRefused,
    UsedAfterClose,
    UsedAfterFork,
)
from relatum.errors._findings import (
    ChunkCorrupt,
    ClaimLost,
    Conflict,
    CoverageConflict,
    DataError,
    GroupConflict,
    IncompleteGroup,
    KeyDefinitionConflict,
    KeyNotDefined,
    MoveConflict,
    NotAStream,
    NotFound,
    OffsetExpired,
    OffsetNotFound,
    PartitionInUse,
    PartitionLost,
    PlacementNotFound,
    PredecessorNotFound,
    ProtocolError,
    RowRefused,
    StreamInUse,
    StreamNotFound,
    StreamReplaced,
    SuperStreamConflict,
    SuperStreamNotFound,
    UndecodableMessage,
)
from relatum.errors._passing import (
    BrokerUnavailable,
    ConnectionLost,
    ConnectionsInUse,
    ContextMoving,
    DatabaseUnavailable,
    NotFinishedInTime,
    NotRecordedInTime,
    ReadTimeout,
    StreamNotHere,
    StreamUnavailable,
    TooManyOpenSets,
    Transient,
)
from relatum.errors._publishing import (
    PublishError,
    PublishNacked,
    PublishOutcomeUnknown,
    PublishRejected,
    PublishUnroutable,
)
from relatum.errors._root import RelatumError

__all__ = [
    "AccessRefused",
    "AnotherBroker",
    "BrokerUnavailable",
    "ChunkCorrupt",
    "ClaimLost",
    "ConfigurationError",
    "Conflict",
    "ConnectionLost",
    "ConnectionsInUse",
    "ContextMoving",
    "CoverageConflict",
    "DataError",
    "DatabaseUnavailable",
    "GroupConflict",
    "HeadersRefused",
    "IncompleteGroup",
    "InvalidGroup",
    "InvalidInput",
    "InvalidKeyDefinition",
    "InvalidRelationshipKey",
    "KeyDefinitionConflict",
    "KeyNotDefined",
    "MoveConflict",
    "NotAStream",
    "NotFinishedInTime",
    "NotFound",
    "NotRecordedInTime",
    "NothingRecorded",
    "OffsetExpired",
    "OffsetNotFound",
    "PartitionInUse",
    "PartitionLost",
    "PlacementNotFound",
    "PredecessorNotFound",
    "ProtocolError",
    "PublishError",
    "PublishNacked",
    "PublishOutcomeUnknown",
    "PublishRejected",
    "PublishUnroutable",
    "ReadTimeout",
    "RelatumError",
    "RowRefused",
    "SchemaMissing",
    "ServerStartFailed",
    "StreamInUse",
    "StreamNotFound",
    "StreamNotHere",
    "StreamReplaced",
    "StreamUnavailable",
    "SuperStreamConflict",
    "SuperStreamNotFound",
    "TimeNotRecorded",
    "TlsRefused",
    "TooManyOpenSets",
    "Transient",
    "UndecodableMessage",
    "UsedAfterClose",
    "UsedAfterFork",
]

for _name in __all__:
    # As they are imported: so tracebacks name them, and pickles find them whatever module they lie in.
    globals()[_name].__module__ = __name__
