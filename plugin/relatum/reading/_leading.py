"""Who knows where a stream ends: its leader. Steps that ask it, for both faces. No I/O.

A node that has a replica may lag behind, also on a healthy cluster, and its word about an end is worth nothing. So the
question for a stream's ends carries the question who leads it (Metadata) in the same write. Where the connected node
leads, that is all; else the leader is asked itself, over a connection of its own that is kept.

The leader, too, may have nothing to show at once. A subscription begins at a chunk that is written, and is given it
when a majority has it: under publishing, the last chunk often is on its way. And a leader that has just started gives
nothing until a replica has confirmed what it has. So "no chunk" is no answer, and is asked again. A stream is empty
only

- where the stream has no other replica: its chunks need nobody's confirmation;
- where StreamStats says so, from RabbitMQ 3.11 on: it counts what is written, committed or not;
- on RabbitMQ 3.10, where the leader showed nothing for `EMPTY_LOOK_S`.

See docs/adr/0012.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final

from relatum.errors import BrokerUnavailable, ReadTimeout, StreamUnavailable
from relatum.reading._batches import StreamBounds
from relatum.wire._frames import Broker

EMPTY_LOOK_S: Final = 1.0
"""Seconds a stream must show nothing at its leader to be taken for empty, where the leader cannot be asked outright.

A leader gives nothing between its election and the first answer of a replica, some milliseconds on an idle machine.
"""

PAUSE_S: Final = (0.002, 0.1)
"""Least and most seconds before a leader is asked again: doubled each time. A chunk is committed within milliseconds, a
leader elected within a second."""

OUT_OF_REACH_S: Final = 5.0
"""Seconds for which a node that could not be reached is not tried again."""

NODE_CONNECT_S: Final = 2.0
"""Seconds to reach another node at most. What a node advertises need not be reachable from here."""

LEADERS_MAX: Final = 10_000
"""Streams whose leaders are remembered."""


class LedElsewhere(StreamUnavailable):
    """The node that was asked does not lead the stream (field `leader`: who does; None while nobody does)."""

    leader: Broker | None


class NotSettled(StreamUnavailable):
    """The leader has nothing to show yet (field `may_be_empty`: not even a first message)."""

    may_be_empty: bool


class OutOfReach(BrokerUnavailable):
    """A node cannot be reached from here: behind a load balancer, nodes advertise names that only they know."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a node for the stream's ends.

    Attributes:
        node: Which one; None for the one that is connected.
        any_node: True takes a node's word that does not lead.
    """

    node: Broker | None
    any_node: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Ends:
    """A stream's ends, and the node whose word they are; None for the one that is connected."""

    bounds: StreamBounds
    node: Broker | None


def ends_of(known: Broker | None, clock: Callable[[], float], timeout_s: float) -> Generator[Ask | Pause, Any, Ends]:
    """Ask for a stream's ends until somebody gives them who can.

    Is sent the `StreamBounds` a node gave, and thrown what went wrong with it.

    Args:
        known: The node that led the stream when it was asked last; None begins with the connected one.
        clock: As `time.monotonic`.
        timeout_s: Seconds until the last error is raised.

    Raises:
        StreamUnavailable: in all that time the stream had no leader, or one that showed nothing.
    """
    deadline, pause, empty_since = clock() + timeout_s, PAUSE_S[0], None
    ask, hops = Ask(known), 0
    while True:
        error: Exception
        try:
            return Ends((yield ask), ask.node)
        except LedElsewhere as elsewhere:
            error, empty_since, hops = elsewhere, None, hops + 1
            # From node to node without a pause once, more often only where two do not agree who leads.
            if elsewhere.leader is not None and elsewhere.leader != ask.node:
                ask = Ask(elsewhere.leader)
                if hops % 2:
                    continue
            else:
                ask = Ask(None)
        except NotSettled as unsettled:
            error = unsettled
            now = clock()
            empty_since = (empty_since or now) if unsettled.may_be_empty else None
            if empty_since is not None and now - empty_since >= EMPTY_LOOK_S:
                return Ends(StreamBounds(None, None, is_proven=not ask.any_node), ask.node)
        except OutOfReach as out:
            error, ask = out, Ask(None, any_node=True)
            continue
        except (StreamUnavailable, ReadTimeout, BrokerUnavailable) as lost:
            if ask.node is None and not isinstance(lost, StreamUnavailable):
                raise
            error, empty_since, ask = lost, None, Ask(None)
        if clock() >= deadline:
            raise error
        yield Pause(pause)
        pause = min(pause * 2, PAUSE_S[1])
