"""Follows any number of streams, each from a given position, over few connections and on one event loop.

After an interruption, reading continues after the last delivered record, which identifies the stream. A node with fewer
messages proves nothing: the follower queries the leader, and waits for its answer. The follower retries forever. An
owner of a replaced stream that knows more positions can follow it from the last unchanged one.

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
