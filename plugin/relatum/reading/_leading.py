"""Who knows where a stream ends: its leader.

A node that has a replica may lag behind, also on a healthy cluster, and its word about an end is worth nothing. So the
question for a stream's ends carries the question who leads it (Metadata) in the same write. Where the connected node
leads, that is all; else the leader is asked itself, over a connection of its own that is kept.

The leader, too, may have nothing to show at once. A subscription begins at a chunk that is written, and is given it
when a majority has it: under publishing, the last chunk often is on its way. And a leader that has just started gives
nothing until a replica has confirmed what it has. So "no chunk" is no answer, and is asked again. A stream is empty

- where StreamStats says so, from RabbitMQ 3.11 on: it counts what is written, committed or not. Where all is committed
  and yet no message comes, what retention left are the broker's own notes;
- on RabbitMQ 3.10, where the leader showed nothing during a look at it: `EMPTY_LOOK_S`, three times that where it
  should have replicas and Metadata names none, and three times more where the stream had messages before. What was
  found so is remembered for `EMPTY_TRUST_S`, as long as no connection to the node is lost. And a node that stood alone
  for a whole look, of which no other was ever heard, commits by itself: nothing is looked for there any more. From
  others, it is silence (`StreamBounds.is_silence`), which may last as long as replicas take to start: who knows of a
  message that lay in the stream concludes nothing from it.

That a stream has no other replica is no reason to believe it sooner: Metadata leaves out replicas that are not up, just
when a leader has nothing to show yet (measured: for up to 0.3 s after 2 of 12 kills of three nodes).

See docs/adr/0012.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from relatum.errors import BrokerUnavailable, ReadTimeout, StreamUnavailable
from relatum.reading._batches import StreamBounds
from relatum.waiting import pause
from relatum.wire import Broker

EMPTY_LOOK_S: Final = 1.0
"""Seconds a stream must show nothing at its leader to be taken for empty, where the leader cannot be asked outright.

A leader shows nothing between its election and the first answer of a replica: 0.3 s at most in 12 kills of three nodes
on a busy machine, and all that time Metadata named no other replica.
"""

EMPTY_FACTOR: Final = 3.0
"""How much longer is looked where a leader may just have been elected, and where a stream had messages: that one can be
empty only if it was declared again."""

EMPTY_TRUST_S: Final = 30.0
"""Seconds for which an emptiness that was looked at for so long is believed without another such look."""

PAUSE_S: Final = (0.002, 0.1)
"""Least and most seconds before a leader is asked again: doubled each time. A chunk is committed within milliseconds, a
leader elected within a second."""

OUT_OF_REACH_S: Final = 5.0
"""Seconds for which a node that could not be reached is not tried again."""

NODE_CONNECT_S: Final = 2.0
"""Seconds to reach another node at most. What a node advertises need not be reachable from here."""

NODES_TRIED_MAX: Final = 4
"""Nodes a scan goes on to, one after the other, because the one before has no replica of the stream."""

STREAMS_MAX: Final = 10_000
"""Streams of which leaders and ends are remembered."""


class LedElsewhere(StreamUnavailable):
    """The node that was asked does not lead the stream (field `leader`: who does; None while nobody does)."""

    leader: Broker | None


class NotSettled(StreamUnavailable):
    """The leader has nothing to show yet.

    Fields: `may_be_empty` (not even a first message), `is_alone` (at present, no other node has a replica that is up).
    """

    may_be_empty: bool
    is_alone: bool


class OutOfReach(BrokerUnavailable):
    """A node cannot be reached from here: behind a load balancer, nodes advertise names that only they know."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is remembered of a stream.

    Attributes:
        node: The node that led it.
        is_empty: Whether it was empty.
        losses: How often a connection to that node had been lost then.
        at: When it was asked.
    """

    node: Broker | None
    is_empty: bool
    losses: int
    at: float


class AskEnds(Protocol):
    """Asks a node for a stream's ends; None for the one that is connected."""

    def __call__(self, node: Broker | None, *, any_node: bool) -> StreamBounds:
        """`any_node`: True takes a node's word that does not lead."""


class Leaders:
    """Who led which stream when it was asked last, and what it said of its being empty. Bounded.

    Args:
        losses: How often a connection to a node (None: the connected one) has been lost so far.
        has_others: Whether the broker is known to have other nodes.
    """

    def __init__(
        self, clock: Callable[[], float], losses: Callable[[Broker | None], int], *, has_others: bool = False
    ) -> None:
        self._clock = clock
        self._losses = losses
        self._known: dict[str, _Known] = {}
        self._has_others = has_others
        self._alone: dict[Broker | None, int] = {}

    def of(self, stream: str) -> Broker | None:
        """The node that led a stream last; None for the one that is connected, or where it was never asked."""
        known = self._known.get(stream)
        return known.node if known is not None else None

    def ends_of(self, stream: str, timeout_s: float, ask: AskEnds) -> StreamBounds:
        """Ask for a stream's ends until somebody gives them who can.

        Raises:
            StreamUnavailable: in all that time the stream had no leader, or one that showed nothing.
        """
        deadline, pause_s, empty_since, losses = self._clock() + timeout_s, PAUSE_S[0], None, 0
        node, any_node, hops = self.of(stream), False, 0
        while True:
            error: Exception
            try:
                return self.noted(stream, node, ask(node, any_node=any_node))
            except LedElsewhere as elsewhere:
                self._has_others = True
                error, empty_since, hops = elsewhere, None, hops + 1
                # From node to node without a pause once, more often only where two do not agree who leads.
                goes_on = elsewhere.leader is not None and elsewhere.leader != node
                node, any_node = elsewhere.leader if goes_on else None, False
                if goes_on and hops % 2:
                    continue
            except NotSettled as unsettled:
                error, now = unsettled, self._clock()
                self._has_others |= not unsettled.is_alone
                # A look ends with its connection: the next may lead to another node, and a leader of a moment.
                before, losses = losses, self._losses(node)
                is_on = unsettled.may_be_empty and losses == before and empty_since is not None
                empty_since = empty_since if is_on else now if unsettled.may_be_empty else None
                if empty_since is not None and self._is_empty(stream, node, unsettled, now, now - empty_since):
                    is_silence = self._has_others or not unsettled.is_alone
                    empty = StreamBounds(None, None, is_proven=not any_node, is_silence=is_silence)
                    return self.noted(stream, node, empty)
            except OutOfReach as out:
                error, node, any_node = out, None, True
                continue
            except (StreamUnavailable, ReadTimeout, BrokerUnavailable) as lost:
                if node is None and not isinstance(lost, StreamUnavailable):
                    raise
                error, empty_since, node, any_node = lost, None, None, False
            if self._clock() >= deadline:
                raise error
            pause(pause_s)
            pause_s = min(pause_s * 2, PAUSE_S[1])

    def _is_empty(self, stream: str, node: Broker | None, shown: NotSettled, now: float, looked_s: float) -> bool:
        """Whether a stream whose leader has shown nothing for so long is empty."""
        known, look_s = self._known.get(stream), EMPTY_LOOK_S
        if shown.is_alone and not self._has_others:
            if looked_s >= look_s:
                self._alone[node] = self._losses(node)
            elif self._alone.get(node) == self._losses(node):
                look_s = 0.0
        elif shown.is_alone:
            look_s *= EMPTY_FACTOR
        if known is not None and not known.is_empty:
            return looked_s >= max(look_s, EMPTY_LOOK_S) * EMPTY_FACTOR
        return looked_s >= look_s or (known is not None and self._is_trusted(known, node, now))

    def _is_trusted(self, known: _Known, node: Broker | None, now: float) -> bool:
        is_recent = known.is_empty and now - known.at < EMPTY_TRUST_S
        return is_recent and (known.node, known.losses) == (node, self._losses(node))

    def noted(self, stream: str, node: Broker | None, bounds: StreamBounds) -> StreamBounds:
        """Take in what a node said of a stream that it leads."""
        known, is_empty, now = self._known.get(stream), bounds.first is None, self._clock()
        if is_empty and known is not None and self._is_trusted(known, node, now):
            # Believed because of an earlier look: only a new one begins the time anew.
            return bounds
        if len(self._known) >= STREAMS_MAX and stream not in self._known:
            self._known.clear()
        self._known[stream] = _Known(node, is_empty, self._losses(node), now)
        return bounds
