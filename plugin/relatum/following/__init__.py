"""Follows any number of streams, each from a position on, over few connections and on one event loop.

Each event of a follower has one meaning, the same for every component.

- **Attached**: the stream is read, and is the known one: the last message that was read is unchanged, as the follower
  saw or the leader confirmed; or retention has dropped it, and nothing contradicts. Any earlier failure is over.
- **Records**: records not delivered before, in order. Offsets ascend, with gaps even in healthy streams.
- **Hole**: retention was faster. The missing records lay before the stream's beginning, which the broker was asked for.
  Other gaps are the stream's own, and are not reported.
- **Replaced**: the stream differs from what was read: another message has a known offset, or the leader says that the
  stream ends before it. The stream lost its end, or was declared again. An owner with more known positions can find the
  last one that agrees, and follow from there. A node that has less proves nothing: its leader is asked, and waited for.
- **CaughtUp**: a node has no more at present. This is not the stream's end, which only the leader knows.
- **Failed**: the stream cannot be read now: it is missing, moving or damaged, reading is refused, or the broker is
  away. The follower retries for ever. A deleted stream is a `StreamNotFound` until it is declared again.

After any interruption a stream goes on behind the last delivered record, and is recognised by that record.

What is in flight is bounded for each stream, and in bytes for all of them; a stream gets credit when the owner is done
with records. So neither a busy stream nor a slow owner slows the others.
"""

from relatum.following._events import Attached, CaughtUp, Event, Failed, Hole, Records, Replaced
from relatum.following._follower import FollowerStatistics, StreamFollower
from relatum.following.reach import Reach

__all__ = [
    "Attached",
    "CaughtUp",
    "Event",
    "Failed",
    "FollowerStatistics",
    "Hole",
    "Reach",
    "Records",
    "Replaced",
    "StreamFollower",
]
