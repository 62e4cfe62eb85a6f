"""Follows any number of streams, each from a given position, over few connections and on one event loop.

The events of a follower mean the same to every component:

- **Attached**: the stream is being read, and is the known one. The last message read is unchanged, as the follower saw
  or the leader confirmed; or retention dropped it, and nothing contradicts. Earlier failures are over.
- **Records**: new records, in order. Offsets ascend, with gaps even in healthy streams.
- **Hole**: retention dropped records before they were read: they precede the first offset that the broker reports.
  Other gaps are normal and not reported.
- **Replaced**: the stream differs from what was read: another message has a known offset, or the leader says that the
  stream ends before it. The stream lost its end, or was declared again. An owner with more known positions can find the
  last one that agrees, and follow from there. A node with fewer messages proves nothing: the follower queries the
  leader, and waits for its answer.
- **CaughtUp**: a node has no more records now. This need not be the stream's end, which only the leader knows.
- **Failed**: the stream cannot be read now: it is missing, moving or damaged, reading is refused, or the broker is
  unreachable. The follower retries forever. A deleted stream is a `StreamNotFound` until it is declared again.

After an interruption, reading continues after the last delivered record, which identifies the stream.

Data in flight is bounded per stream, and in bytes for all streams; a stream gets credit when the owner releases
records. So neither a busy stream nor a slow owner slows down other streams.
"""

from relatum.reading.following._delivery import Attached, CaughtUp, Event, Failed, Hole, Records, Replaced
from relatum.reading.following._follower import BrokerReach, FollowerStatistics, StreamFollower

__all__ = [
    "Attached",
    "BrokerReach",
    "CaughtUp",
    "Event",
    "Failed",
    "FollowerStatistics",
    "Hole",
    "Records",
    "Replaced",
    "StreamFollower",
]
