"""Follows any number of streams, each from a given position, over few connections and on one event loop.

The events of a follower mean the same to every component:

- **Attached**: the stream is being read and is the known one. The follower or the leader saw the last known message
  unchanged, or retention dropped it and no message contradicts it. Earlier failures are over.
- **Records**: new records, in order. Offsets ascend, with gaps even in healthy streams.
- **Hole**: retention dropped records before they were read: they precede the first offset that the broker reports.
  Other gaps are normal and not reported.
- **Replaced**: the stream lost its end or was declared again: another message has the known offset, or the leader
  reports an earlier end. An owner that knows more positions can find the last unchanged one, and follow from there. A
  node with fewer messages proves nothing: the follower queries the leader, and waits for its answer.
- **CaughtUp**: the node has no more records now. Only the leader knows whether this is the stream's end.
- **Failed**: the stream cannot be read now: it is missing, moving or damaged, reading is refused, or the broker is
  unreachable. The follower retries forever. A deleted stream is a `StreamNotFound` until it is declared again.

After an interruption, reading continues after the last delivered record, which identifies the stream.

Data in flight is bounded in chunks per stream, and in bytes for all streams. A stream gets credit when the owner
releases records, so neither a busy stream nor a slow owner delays other streams.
"""

from relatum.reading.following._delivery import Attached, CaughtUp, Event, Failed, Hole, Records, Replaced
from relatum.reading.following._follower import BrokerReach, FollowerStatistics, StreamFollower, is_outage

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
    "is_outage",
]
