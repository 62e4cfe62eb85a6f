"""The connections that streams are read over: up to 256 on a connection, and a connection for each node that has some.

A stream is asked for where the follower is connected first. Only where it has no replica there, it is asked where it
lies (many streams in one question), and read from a node that has one.
"""

import time
from typing import TYPE_CHECKING, Final

from relatum.errors import ConfigurationError, StreamNotHere
from relatum.following._followed import SETTLED_S, Followed
from relatum.following._link import Link
from relatum.following._shelf import Held
from relatum.following._subscriptions import Ended, Placed, Quiet, Subscriptions
from relatum.reading import OUT_OF_REACH_S, PLACES_AT_ONCE, Broker, SocketConnection, StreamPlaces, other_nodes
from relatum.waiting import Pauses
from relatum.wire import Chunk, Code, Event

if TYPE_CHECKING:
    from relatum.following._desk import Desk

BEAT_S: Final = 1.0
"""Seconds between two looks at heartbeats: a tenth of one, at least, is what they are late."""

SPREAD_MAX: Final = 6
"""Connections that streams are spread over where those of one wait for each other: eight, with two to ask by."""


class Seat:
    """A connection, and the streams that are read over it.

    Args:
        links: All of them.
        lane: The node's connections.
        connection: The connection.
    """

    def __init__(self, links: "Links", lane: "Lane", connection: SocketConnection) -> None:
        self.lane = lane
        self.opened_at = time.monotonic()
        self.link = Link(
            links.desk.loop,
            connection,
            came=lambda events: links.came(self, events),
            lost=lambda error: links.lost(self, error),
        )
        self.subscriptions = Subscriptions(self.link.session)


class Lane:
    """A node: its connections, and the streams that wait for one.

    Args:
        node: The node; None for the one that is connected first.
    """

    def __init__(self, node: Broker | None) -> None:
        self.node = node
        self.seats: list[Seat] = []
        self.waiting: dict[Followed, None] = {}
        self.is_opening = False
        self.pauses = Pauses()
        self.out_until = 0.0

    def roomiest(self) -> Seat | None:
        """The connection that has most room; None where none has any."""
        seat = max(self.seats, key=lambda each: each.subscriptions.room, default=None)
        return seat if seat is not None and seat.subscriptions.room > 0 else None


class Links:
    """The connections.

    Args:
        desk: Whose streams are read.
        connections_max: Connections that streams are read over at most.
    """

    def __init__(self, desk: "Desk", connections_max: int) -> None:
        self.desk = desk
        self._connections_max = connections_max
        self._spread_most = self._spread_max = min(SPREAD_MAX, connections_max)
        self._lanes: dict[Broker | None, Lane] = {}
        self._home = self._lane(None)
        self._misplaced: dict[str, Followed] = {}
        self._dirty: dict[Seat, None] = {}
        self._is_paused = self._is_closed = False
        self._beat()

    @property
    def connections(self) -> int:
        """How many there are."""
        return sum(len(lane.seats) for lane in self._lanes.values())

    def _lane(self, node: Broker | None) -> Lane:
        if node not in self._lanes:
            self._lanes[node] = Lane(node)
        return self._lanes[node]

    # --- what the desk asks for ---------------------------------------------------------------------------------------

    def seat(self, followed: Followed) -> None:
        """Subscribe, where there is room; else it waits for another connection."""
        lane = self._lane(followed.node)
        seat = lane.roomiest()
        if seat is None or (seat.subscriptions.is_crowded and self.connections < self._spread_max):
            lane.waiting[followed] = None
            self._open(lane)
            return
        followed.seat = seat
        seat.subscriptions.add(followed, self.desk.begins(followed))
        self._touch(seat)

    def unseat(self, followed: Followed) -> None:
        """Unsubscribe."""
        seat, followed.seat = followed.seat, None
        self._lane(followed.node).waiting.pop(followed, None)
        self._misplaced.pop(followed.stream, None)
        if seat is not None:
            seat.subscriptions.remove(followed)
            self._touch(seat)

    def grant(self, followed: Followed, credit: int) -> None:
        """Grant credit; as long as it was not seen to be without more, whether it is now is asked, too.

        Also without credit, where what came since was larger than what had been expected: so much is under way still
        that there may be none for a long time.
        """
        asks = not followed.is_quiet and (credit > 0 or (followed.has_come and followed.may_come))
        if credit or asks:
            followed.seat.subscriptions.grant(followed, credit, asks=asks)
            self._touch(followed.seat)

    def pause(self, is_paused: bool) -> None:
        """Read nothing for now, or again."""
        self._is_paused = is_paused
        for lane in list(self._lanes.values()):
            for seat in list(lane.seats):
                seat.link.pause(is_paused)

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        for lane in self._lanes.values():
            seats, lane.seats = lane.seats, []
            for seat in seats:
                seat.link.close()

    # --- connections --------------------------------------------------------------------------------------------------

    def _touch(self, seat: Seat) -> None:
        """Send what is to be sent, once for all that comes up in this turn of the loop."""
        if not self._dirty:
            self.desk.loop.add_callback(self._flush)
        self._dirty[seat] = None

    def _flush(self) -> None:
        seats, self._dirty = list(self._dirty), {}
        if self._misplaced and self._home.seats:
            names = list(self._misplaced)
            for start in range(0, len(names), PLACES_AT_ONCE):
                self._home.seats[0].subscriptions.ask_places(names[start : start + PLACES_AT_ONCE])
            seats.append(self._home.seats[0])
        for seat in seats:
            seat.subscriptions.set_barrier()
            seat.link.flush()

    def _beat(self) -> None:
        if self._is_closed:
            return
        now = time.monotonic()
        for lane in list(self._lanes.values()):
            for seat in list(lane.seats):
                seat.link.beat(now)
        self.desk.loop.call_later(BEAT_S, self._beat)

    def _open(self, lane: Lane) -> None:
        if lane.is_opening or self._is_closed:
            return
        if self.connections >= self._connections_max + sum(seat.subscriptions.is_worn for seat in lane.seats):
            error = ConfigurationError(
                f"{len(lane.waiting)} more streams need more than connections_max={self._connections_max} connections "
                "to the broker: divide the streams among more processes"
            )
            for followed in list(lane.waiting):
                self.desk.failed(followed, error)
            return
        lane.is_opening = True
        node = lane.node
        self.desk.helpers.ask(lambda: self.desk.questions.link(node), lambda opened: self._opened(lane, opened))

    def _opened(self, lane: Lane, opened: SocketConnection | Exception) -> None:
        lane.is_opening = False
        if self._is_closed:
            if isinstance(opened, SocketConnection):
                opened.close()
        elif isinstance(opened, Exception):
            self._not_opened(lane, opened)
        else:
            self._use(lane, Seat(self, lane, opened))

    def _use(self, lane: Lane, new: Seat) -> None:
        lane.seats.append(new)
        self._spread_max = self._spread_most
        self.desk.back()
        new.link.pause(self._is_paused)
        for seat in [each for each in lane.seats if each.subscriptions.is_worn]:
            self._retire(lane, seat)
        self._seat_waiting(lane)

    def _seat_waiting(self, lane: Lane) -> None:
        waiting, lane.waiting = list(lane.waiting), {}
        for followed in waiting:
            self.seat(followed)

    def _retire(self, lane: Lane, seat: Seat) -> None:
        """Let go of a connection for which the broker holds too many files open."""
        lane.seats.remove(seat)
        self._again(lane, seat)
        seat.link.close()

    def _again(self, lane: Lane, seat: Seat) -> None:
        """Have the streams of a connection wait for another one."""
        self._dirty.pop(seat, None)
        for followed in seat.subscriptions.followed.values():
            followed.seat = followed.subscription = None
            followed.round += 1
            lane.waiting[followed] = None

    def _not_opened(self, lane: Lane, error: Exception) -> None:
        if lane.roomiest() is not None:
            # It was only to spread them, and the broker may let no more in.
            self._spread_max = self.connections
            self._seat_waiting(lane)
            return
        if lane.node is not None:
            # It may advertise a name that only it knows: the streams are looked for elsewhere.
            lane.out_until = time.monotonic() + OUT_OF_REACH_S
            for followed in list(lane.waiting):
                self._give_up(followed, error)
            return
        self.desk.away(error)
        self._open_later(lane, error)

    def _open_later(self, lane: Lane, error: Exception) -> None:
        def again() -> None:
            lane.is_opening = False
            if lane.waiting:
                self._open(lane)

        lane.is_opening = True
        self.desk.loop.call_later(lane.pauses.after(error), again)

    def lost(self, seat: Seat, error: Exception) -> None:
        """A connection has ended by itself."""
        lane = seat.lane
        if seat not in lane.seats:
            return
        lane.seats.remove(seat)
        if time.monotonic() - seat.opened_at >= SETTLED_S:
            lane.pauses = Pauses()
        self._again(lane, seat)
        if lane.node is None:
            self.desk.away(error)
        if not lane.is_opening and lane.waiting:
            self._open_later(lane, error)

    # --- what came ----------------------------------------------------------------------------------------------------

    def came(self, seat: Seat, events: list[Event]) -> None:
        """Something came over a connection."""
        subscriptions, desk = seat.subscriptions, self.desk
        for event in events:
            if type(event) is Chunk:
                followed = subscriptions.followed.get(event.subscription)
                if followed is not None:
                    followed.has_come = True
                    desk.came(followed, Held(event))
            else:
                self._told(seat, event)

    def _told(self, seat: Seat, event: Event) -> None:
        for outcome in seat.subscriptions.outcomes(event):
            if isinstance(outcome, Quiet):
                self.desk.quiet(outcome.followed)
            elif isinstance(outcome, Ended):
                self._ended(outcome)
                self._touch(seat)
            elif isinstance(outcome, Placed):
                self._placed(seat, outcome.places)

    def _ended(self, ended: Ended) -> None:
        followed, error = ended.followed, ended.error
        followed.seat = None
        if isinstance(error, StreamNotHere):
            if followed.node is not None:
                self._give_up(followed, error)
            else:
                followed.round += 1
                self._misplaced[followed.stream] = followed
        elif ended.code == Code.STREAM_DOES_NOT_EXIST:
            self._ask_why(followed)
        else:
            self.desk.failed(followed, error)

    def _ask_why(self, followed: Followed) -> None:
        followed.round += 1
        begun = followed.round

        def answered(error: Exception | None) -> None:
            if followed.round != begun:
                return
            if error is None:
                self.desk.again(followed)
            else:
                self.desk.failed(followed, error)

        self.desk.helpers.ask(lambda: self.desk.questions.why_missing(followed.stream), answered)

    def _placed(self, seat: Seat, all_places: list[StreamPlaces]) -> None:
        now, own = time.monotonic(), seat.subscriptions.own_node()
        for places in all_places:
            followed = self._misplaced.pop(places.stream, None)
            if followed is None:
                continue
            nodes = other_nodes(places, own)
            node = next((each for each in nodes if self._lane(each).out_until <= now), None)
            if node is None:
                message = f"The stream {places.stream!r} has no replica on a node that can be reached from here."
                self._give_up(followed, StreamNotHere(message, stream=places.stream))
            else:
                followed.node = node
                self.seat(followed)

    def _give_up(self, followed: Followed, error: Exception) -> None:
        self._lane(followed.node).waiting.pop(followed, None)
        followed.node = None
        self.desk.failed(followed, error)
