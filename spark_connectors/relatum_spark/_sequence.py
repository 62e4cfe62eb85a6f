"""How a write is numbered, so that a task that runs again publishes nothing twice. Pure.

RabbitMQ keeps, for a stream and the reference of a named producer, the highest publishing id it has stored; a message
with that id or a lower one is confirmed and dropped. So every message of a write has a publishing id that a second run
of its task finds again.

**The reference** is `PRODUCER-WRITE-pPARTITION-bBLOCK`. WRITE is the streaming query's id, or a batch's `writeId`;
PARTITION is the task's number; BLOCK changes once in 65,536 micro-batches. The epoch (the micro-batch's number) is
not in it: RabbitMQ remembers about 255 references of a stream and forgets the oldest, so a reference must last. That
is also why a write may have 200 tasks at most.

**The publishing id** is 63 bits: `epoch % 65,536` (16), the message's number among those this task sends to that
stream in this epoch, from 1 (24), and a digest of all of them up to here (23). It grows along a stream whatever the
digests are, since the numbers above them do. Numbers and digests are counted for each stream of a super stream
apart, because a task that dies may have got further in one than in another.

**A task that runs again** asks for the last publishing id of its reference in each stream, before it sends anything:

| the last id is | then |
| --- | --- |
| none, or of an earlier epoch | nothing of this epoch is in the stream: all is sent |
| of this epoch, and one of the ids of this run | all up to it is there, in this order: what follows is sent |
| of this epoch, and no id of this run | the rows came in another order, or are others: an error |
| of a later epoch | the query was set back by more than one micro-batch: an error |

The digest is what tells the third row from the second: without it a task whose rows come back in another order would
send some of them twice and drop others silently. Two orders have one digest once in 8 million. It covers what the
user gave (body, headers, properties, keys, a given time), not the time and the `message_id` that the sink adds.

All rows of a task are numbered before the first is sent, so an error means that this run has sent nothing. A second
attempt beside a first that still runs (speculation) sends the same ids in the same order: the broker takes each once.

What this cannot see: rows that moved to *another task* between two runs. A replay must be cut into the same
partitions, as Spark itself asks of a source.

Source: https://www.rabbitmq.com/docs/stream-effectively-once-processing, osiris_tracking.erl.
"""

import hashlib
import zlib
from collections.abc import Iterable
from typing import Final

from relatum.errors import Conflict, InvalidInput

DIGEST_BITS: Final = 23
INDEX_BITS: Final = 24
EPOCH_BITS: Final = 16
ROWS_MAX: Final = (1 << INDEX_BITS) - 1
"""Messages a task may send to one stream in one epoch: 16.7 million."""

TASKS_MAX: Final = 200
"""Tasks a write may have: RabbitMQ remembers 255 producers of a stream, and there are others."""

NAME_BYTES_MAX: Final = 200
"""Bytes of a producer's and a write's name together: a reference ends at 255."""

EPOCH_MAX: Final = (1 << 62) - 1

_DIGEST_MASK: Final = (1 << DIGEST_BITS) - 1
_BLOCK_EPOCHS: Final = 1 << EPOCH_BITS


def check_names(producer: str, write: str) -> None:
    """Refuse names that are too long together to make a reference."""
    size = len(producer.encode()) + len(write.encode())
    if size > NAME_BYTES_MAX:
        raise InvalidInput(
            f"producerName and writeId have {size} bytes together; {NAME_BYTES_MAX} are allowed, of RabbitMQ's 255"
        )


def reference_of(producer: str, write: str, task: int, epoch: int) -> str:
    """The reference a task publishes under; raises `InvalidInput` where there are too many tasks."""
    if task >= TASKS_MAX:
        raise InvalidInput(
            f"a write may have {TASKS_MAX} partitions, this one has number {task}: RabbitMQ remembers too few producers"
            f" of a stream for more. coalesce({TASKS_MAX}) the rows before they are written; other partitions may be"
            " published already"
        )
    return f"{producer}-{write}-p{task}-b{epoch // _BLOCK_EPOCHS}"


class Numbering:
    """The publishing ids of one task in one stream, in order; `epoch` is the micro-batch's number, or `batchId`."""

    __slots__ = ("_digest", "_epoch", "_message_id", "index", "stream")

    def __init__(self, reference: str, epoch: int, stream: str) -> None:
        self.stream = stream
        self.index = 0
        self._digest = 0
        self._epoch = epoch % _BLOCK_EPOCHS << INDEX_BITS + DIGEST_BITS
        # Version 8 of RFC 9562: ids of one's own making. The name is in 74 bits, the number in the last 48.
        name = hashlib.sha256(f"{reference}\0{epoch}\0{stream}".encode()).hexdigest()
        self._message_id = f"{name[:8]}-{name[8:12]}-8{name[12:15]}-{'89ab'[int(name[15], 16) % 4]}{name[16:19]}-"

    def next_message_id(self) -> str:
        """The `message_id` for the next message, where it has none: the same in each run, a UUID."""
        return f"{self._message_id}{self.index + 1:012x}"

    def next(self, content: Iterable[bytes]) -> int:
        """The publishing id of the next message; `content` is what the user gave of it, encoded, in parts."""
        if self.index == ROWS_MAX:
            raise InvalidInput(
                f"a task may write {ROWS_MAX} rows to {self.stream!r} at once: use more partitions; nothing was sent"
            )
        self.index += 1
        digest = self._digest
        for part in content:
            digest = zlib.crc32(part, digest)
        self._digest = digest
        return self._epoch | self.index << DIGEST_BITS | digest & _DIGEST_MASK

    def resume_after(self, last: int) -> int:
        """The id this run must have and may go on after; 0 where nothing of this epoch was sent before.

        `last` is the last publishing id of the reference in the stream, 0 for none; a later epoch's is a `Conflict`.
        """
        if last < self._epoch:
            return 0
        if last >> INDEX_BITS + DIGEST_BITS > self._epoch >> INDEX_BITS + DIGEST_BITS:
            raise Conflict(
                f"the stream {self.stream!r} already has messages of a later batch of this write: it was set back by"
                " more than one batch, and what would be published twice cannot be known. Nothing was sent."
                " Use a new checkpoint, or a new writeId, to publish all of it again",
                stream=self.stream,
            )
        return last


def other_rows(stream: str) -> Conflict:
    """The error for a task whose rows are not those it had begun to send."""
    return Conflict(
        f"an earlier run of this task has sent rows to {stream!r}, and now they are others or came in another order:"
        " what would be published twice or not at all cannot be known. Nothing was sent by this run. Sort the rows"
        " within partitions (sortWithinPartitions) or checkpoint them before they are written; give each write of its"
        " own a writeId of its own",
        stream=stream,
    )
