"""The numbering of a write's messages, by which a retried task publishes nothing twice. No input or output.

For each stream and reference of a named producer, RabbitMQ keeps the highest stored publishing id. It confirms and
drops messages with that id or a lower one. So every message of a write has a publishing id that a retry of its task
computes again.

**The reference** is `PRODUCER-WRITE-pPARTITION-bBLOCK`. WRITE is the streaming query's id, or a batch's `writeId`;
PARTITION is the task's number; BLOCK changes every 65,536 micro-batches. The reference does not contain the epoch (the
micro-batch's number), since it must last: RabbitMQ remembers about 255 references of a stream and forgets the oldest.
For the same reason a write may have at most 200 tasks.

**The publishing id** has 63 bits: `epoch % 65,536` (16), the message's number, from 1, among the messages that this
task sends to the stream in this epoch (24), and a digest of all these messages so far (23). The id increases with the
number, regardless of the digests. Each stream of a super stream has its own numbers and digests, since a task that dies
may have sent more to one stream than to another.

**A retried task** queries the last publishing id of its reference in each stream before it sends anything:

| the last id is | then |
| --- | --- |
| missing, or of an earlier epoch | the stream has nothing of this epoch: everything is sent |
| of this epoch, and an id of this run | everything up to it is stored in this order: the rest is sent |
| of this epoch, but no id of this run | the rows differ or have another order: an error |
| of a later epoch | the query was rewound by more than one micro-batch: an error |

Only the digest distinguishes the third case from the second. Without it, a task whose rows return in another order
would send some rows twice and silently drop others. Two orders have equal digests once in 8 million. The digest covers
the user's part (body, headers, properties, keys, a given time), not the time and `message_id` that the sink adds.

All rows of a task are numbered before the first is sent, so an error means that this run has sent nothing. A
speculative second attempt sends the same ids in the same order, and the broker stores each once.

Rows that move to *another task* between two runs are not detected. A replay must have the same partitions, as Spark
itself requires of a source.

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
"""Maximum messages of a task to one stream in one epoch: 16.7 million."""

TASKS_MAX: Final = 200
"""Maximum tasks of a write: RabbitMQ remembers 255 producers of a stream, and others need some."""

NAME_BYTES_MAX: Final = 200
"""Maximum bytes of a producer's and a write's name together: a reference has at most 255."""

EPOCH_MAX: Final = (1 << 62) - 1

_DIGEST_MASK: Final = (1 << DIGEST_BITS) - 1
_BLOCK_EPOCHS: Final = 1 << EPOCH_BITS


def check_names(producer: str, write: str) -> None:
    """Raise `InvalidInput` if the names together are too long for a reference."""
    size = len(producer.encode()) + len(write.encode())
    if size > NAME_BYTES_MAX:
        raise InvalidInput(
            f"producerName and writeId have {size} bytes together, more than {NAME_BYTES_MAX}: shorten them"
        )


def reference_of(producer: str, write: str, task: int, epoch: int) -> str:
    """Return the reference of a task's producer; raises `InvalidInput` if there are too many tasks."""
    if task >= TASKS_MAX:
        raise InvalidInput(
            f"a write has at most {TASKS_MAX} partitions, because RabbitMQ remembers few producers of a stream; this is"
            f" partition {task + 1}. Call coalesce({TASKS_MAX}) before the write. Other partitions may already be"
            " published"
        )
    return f"{producer}-{write}-p{task}-b{epoch // _BLOCK_EPOCHS}"


class Numbering:
    """The publishing ids of a task in a stream, in order; `epoch` is the micro-batch's number, or `batchId`."""

    __slots__ = ("_digest", "_epoch", "_message_id", "index", "stream")

    def __init__(self, reference: str, epoch: int, stream: str) -> None:
        self.stream = stream
        self.index = 0
        self._digest = 0
        self._epoch = epoch % _BLOCK_EPOCHS << INDEX_BITS + DIGEST_BITS
        # A custom UUID: version 8 of RFC 9562. The name is in 74 bits, the number in the last 48.
        name = hashlib.sha256(f"{reference}\0{epoch}\0{stream}".encode()).hexdigest()
        self._message_id = f"{name[:8]}-{name[8:12]}-8{name[12:15]}-{'89ab'[int(name[15], 16) % 4]}{name[16:19]}-"

    def next_message_id(self) -> str:
        """Return a UUID as `message_id` for the next message without one; it is the same in each run."""
        return f"{self._message_id}{self.index + 1:012x}"

    def next(self, content: Iterable[bytes]) -> int:
        """Return the publishing id of the next message; `content` is the user's part of it, encoded."""
        if self.index == ROWS_MAX:
            raise InvalidInput(
                f"a task may write at most {ROWS_MAX} rows to the stream {self.stream!r}: use more partitions; nothing"
                " was sent"
            )
        self.index += 1
        digest = self._digest
        for part in content:
            digest = zlib.crc32(part, digest)
        self._digest = digest
        return self._epoch | self.index << DIGEST_BITS | digest & _DIGEST_MASK

    def resume_after(self, last: int) -> int:
        """Return the publishing id after which this run continues; 0 if the epoch has sent nothing.

        `last` is the reference's last publishing id in the stream, or 0; an id of a later epoch raises `Conflict`. The
        caller must check that this run has the returned id: if not, its rows differ from the earlier run's.
        """
        if last < self._epoch:
            return 0
        if last >> INDEX_BITS + DIGEST_BITS > self._epoch >> INDEX_BITS + DIGEST_BITS:
            raise Conflict(
                f"the stream {self.stream!r} already has messages of a later batch: the write was rewound by more than"
                " one batch, so publishing might store messages twice. Nothing was sent."
                " Use a new checkpoint or writeId to publish everything again",
                stream=self.stream,
            )
        return last
