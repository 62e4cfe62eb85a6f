"""The subscriptions of one connection: who has which number, what credit, and what came of it. No I/O.

Whoever subscribes or is granted credit may ask for a barrier: the answer to an empty Metadata. The broker handles a
connection's commands in order, so what was there to send has come by then; a stream that got nothing has no more at
present, at this node.
"""

from typing import TYPE_CHECKING, Final

from relatum.errors import RelatumError, StreamUnavailable
from relatum.reading import ATTACHES_MAX, CLOSES_SINCE, Broker, StreamPlaces, refusal
from relatum.wire import (
    SUBSCRIPTIONS,
    Answer,
    Chunk,
    Code,
    CreditRefused,
    Damaged,
    Event,
    Start,
    StartSpec,
    StreamMoved,
    StreamSession,
    frames,
    is_before,
)

if TYPE_CHECKING:
    from relatum.following._connection import Connection
    from relatum.following._followed import Followed

WAITS_BEFORE: Final = (4, 2, 1)
"""Version before which a connection waits two milliseconds, for all its streams, whenever one of them has no more: for
each lone message. Source: rabbitmq-server, pull request 14766; `timer:sleep(1)` in `rabbit_stream_reader` of 3.10.8."""

CROWD: Final = 64
"""Streams whose messages wait for each other then, on one connection, for an eighth of a second at most."""

CHUNKS_MAX: Final = 1024
"""Chunks that a stream has under way and held, at most: of one message each where they are published one by one. A
taker who is done with what came five times a second keeps up with 5,000 of them."""


class Interrupted(Exception):
    """The connection has ended: the connections tell of it, once for all its streams."""


class Ended(Exception):
    """The broker refused a subscription, or ended it: its code, and the error that it amounts to."""

    def __init__(self, code: int, error: RelatumError) -> None:
        super().__init__(code, error)
        self.code = code
        self.error = error


class Subscription:
    """The reading of one stream over one connection: its number there, and its credit.

    `barrier` is answered when all that was asked for last has come; `is_quiet` says that it was seen to have no more.
    """

    def __init__(self, followed: "Followed", number: int, window_bytes: int) -> None:
        self.followed = followed
        self.number = number
        self.connection: Connection | None = None
        self.barrier: int | None = None
        self.has_come = self.is_quiet = False
        self._under_way, self._held, self._window = 1, 0, 1
        self._window_bytes = window_bytes

    def on_chunk(self, chunk: Chunk) -> None:
        """A chunk came that was under way; of what is like it, as many may be at once as fit."""
        self.has_come = True
        self._under_way -= 1
        self._held += 1
        self._window = min(CHUNKS_MAX, self._window_bytes // (len(chunk.data) or 1) or 1)

    def free(self) -> None:
        """One that came is held no more."""
        self._held -= 1

    def credit(self) -> int:
        """How many chunks more may be under way now; they are from now on.

        Of a stream that was seen to have no more, none as long as half of what may be is under way: a credit for each
        chunk costs both sides as much as the chunk. Of others each is asked for, since a barrier goes with it.
        """
        if self.is_quiet and self._under_way * 2 > self._window:
            return 0
        credit = max(0, self._window - self._under_way - self._held)
        self._under_way += credit
        return credit

    @property
    def may_come(self) -> bool:
        """Whether more may come: else that nothing does says nothing."""
        return self._under_way > 0


class Subscriptions:
    """The subscriptions of one session."""

    def __init__(self, session: StreamSession) -> None:
        self._session = session
        self._all: dict[int, Subscription] = {}
        self._answers: dict[int, int] = {}
        self._awaiting: dict[int, None] = {}
        self._barriers: dict[int, list[int]] = {}
        self._places: set[int] = set()
        self._attaches = 0

    @property
    def room(self) -> int:
        """How many more can be subscribed to: numbers that are ending are not free yet."""
        return min(SUBSCRIPTIONS - self._session.subscription_count, self._attaches_left)

    @property
    def is_crowded(self) -> bool:
        """Whether another stream is better read over another connection: its messages would wait for those of many."""
        return len(self._all) >= CROWD and is_before(self._version, WAITS_BEFORE)

    @property
    def is_worn(self) -> bool:
        """Whether the connection is to be replaced when it has to take another: the broker leaks files for it."""
        return self._attaches_left <= 0

    @property
    def _attaches_left(self) -> int:
        return ATTACHES_MAX - self._attaches if is_before(self._version, CLOSES_SINCE) else SUBSCRIPTIONS

    @property
    def _version(self) -> str:
        return self._session.server_properties.get("version", "")

    @property
    def own_node(self) -> Broker:
        """The node, as it advertises itself."""
        properties = self._session.connection_properties
        port = properties.get("advertised_port", "")
        return Broker(properties.get("advertised_host", ""), int(port) if port.isdecimal() else 0)

    # --- what is asked for --------------------------------------------------------------------------------------------

    def add(self, followed: "Followed", offset: int, window_bytes: int) -> Subscription:
        """Subscribe, with one credit and a barrier."""
        number = self._session.take_subscription()
        correlation = self._session.next_correlation()
        self._attaches += 1
        self._answers[correlation] = number
        subscription = self._all[number] = Subscription(followed, number, window_bytes)
        start = StartSpec(Start.OFFSET, offset)
        self._session.send(frames.subscribe(correlation, number, followed.stream, start, 1))
        self._awaiting[number] = None
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """Unsubscribe; what is under way for it is dropped as it comes."""
        number = subscription.number
        if self._all.get(number) is subscription:
            del self._all[number]
            self._awaiting.pop(number, None)
            self._session.unsubscribe(number)

    def grant(self, subscription: Subscription) -> bool:
        """Grant what credit there is; whether something is to be sent.

        As long as the stream was not seen to be without more, whether it is now is asked, too. Also without credit,
        where what came since was larger than what had been expected: so much is under way still that there may be none
        for a long time.
        """
        if self._all.get(subscription.number) is not subscription:
            return False
        credit = subscription.credit()
        asks = not subscription.is_quiet and (credit > 0 or (subscription.has_come and subscription.may_come))
        if credit:
            self._session.send(frames.credit(subscription.number, credit))
        if asks:
            subscription.has_come, subscription.barrier = False, None
            self._awaiting[subscription.number] = None
        return credit > 0 or asks

    def ask_places(self, streams: list[str]) -> None:
        """Ask where streams lie, in one frame."""
        correlation = self._session.next_correlation()
        self._places.add(correlation)
        self._session.send(frames.metadata(correlation, streams))

    def set_barrier(self) -> None:
        """One barrier for all that were subscribed or granted credit since the last one."""
        if self._awaiting:
            correlation = self._session.next_correlation()
            self._barriers[correlation] = list(self._awaiting)
            for number in self._awaiting:
                self._all[number].barrier = correlation
            self._awaiting.clear()
            self._session.send(frames.metadata(correlation, []))

    def interrupt(self) -> None:
        """Tell all streams that the connection has ended."""
        subscriptions, self._all = self._all, {}
        self._awaiting.clear()
        for subscription in subscriptions.values():
            subscription.connection = None
            subscription.followed.on_ended(Interrupted())

    # --- what came ----------------------------------------------------------------------------------------------------

    def receive(self, events: list[Event]) -> list[StreamPlaces]:
        """Give what came to the streams that it is for; where streams lie is returned, as far as it was asked for."""
        places = list[StreamPlaces]()
        for event in events:
            if type(event) is Chunk:
                subscription = self._all.get(event.subscription)
                if subscription is not None:
                    subscription.on_chunk(event)
                    subscription.followed.on_chunk(event)
            elif type(event) is Answer:
                places += self._answered(event)
            elif type(event) is StreamMoved:
                error = StreamUnavailable(f"The stream {event.stream!r} moved or was deleted.", stream=event.stream)
                for each in [each for each in self._all.values() if each.followed.stream == event.stream]:
                    self._end(each, event.code, error)
            elif isinstance(event, CreditRefused | Damaged):
                self._broken(event)
        return places

    def _broken(self, event: CreditRefused | Damaged) -> None:
        subscription = self._all.get(event.subscription)
        if subscription is None:
            return
        if isinstance(event, Damaged):
            self._end(subscription, Code.OK, event.error)
        else:
            stream = subscription.followed.stream
            error = StreamUnavailable(f"The broker dropped the subscription to {stream!r}.", stream=stream)
            self._end(subscription, event.code, error)

    def _answered(self, answer: Answer) -> list[StreamPlaces]:
        if answer.correlation in self._places:
            self._places.discard(answer.correlation)
            return frames.decode_metadata(answer.body)
        for number in self._barriers.pop(answer.correlation, ()):
            subscription = self._all.get(number)
            # One that was granted credit since is asked about by a later one.
            if subscription is not None and subscription.barrier == answer.correlation and not subscription.has_come:
                subscription.followed.on_drained()
        subscription = self._all.get(self._answers.pop(answer.correlation, -1))
        if subscription is not None and answer.code != Code.OK:
            self._end(subscription, answer.code, refusal(subscription.followed.stream, answer.code))
        return []

    def _end(self, subscription: Subscription, code: int, error: RelatumError) -> None:
        # Also where the broker has none any more: its answer makes the number free.
        self.remove(subscription)
        subscription.followed.on_ended(Ended(code, error))
