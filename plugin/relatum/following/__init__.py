"""Streams followed for ever, each from a position on: any number of them, over few connections, on one loop.

Each event of a follower has one meaning, the same for every component.

- **Attached**: the stream is read, and is the one that is known: the message that was read last lies where it lay, as
  was seen, or by the word of its leader where a node is behind; or retention has taken it, and then nothing speaks
  against it. It ends whatever the stream waited for.
- **Records**: what was not given before, in order. Offsets ascend, and have gaps in healthy streams, too.
- **Hole**: retention was faster. What is missing lay before the stream's begin, which the broker was asked for; all
  other gaps are the stream's own, and not told.
- **Replaced**: the stream is not what was read of it: something else lies there, or its leader says that it ends
  before. It lost its end, or is another stream of that name; who remembers more positions finds the last that agrees,
  and follows from there. Nothing else proves it: a node that has less is behind, and its leader is asked; where nobody
  can say, the stream is waited for.
- **CaughtUp**: a node has no more at present. No end is concluded from it: ends are the leader's.
- **Failed**: it cannot be read now: it is not there, not to be read, moving, damaged, or the broker is away. It is
  tried again for ever, by itself. That a stream is deleted is a `StreamNotFound`, until it is declared again.

After any break a stream goes on behind the last record that the owner was given, and is recognised by that record.

Each stream may have so much under way, and all together hold so many bytes; a stream gets more when the owner is done
with some. So neither a busy stream nor a slow owner slows the others.
"""

from relatum.following._events import Attached, CaughtUp, Event, Failed, Hole, Records, Replaced
from relatum.following._follower import FollowerStatistics, StreamFollower
from relatum.following._reach import Reach

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
