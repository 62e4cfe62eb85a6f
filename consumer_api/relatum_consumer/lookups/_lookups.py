"""The look-ups by their public arguments, which are checked here."""

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, Literal, TypeAlias, get_args

from relatum.checks import checked_count, checked_name, checked_seconds
from relatum.errors import InvalidInput
from relatum.keys import InvalidValue, timestamp_us
from relatum.limits import KEY_VALUE_BYTES_MAX, TIME_US_MAX
from relatum.reading import Message
from relatum_consumer.consumed import Consumed, in_hand
from relatum_consumer.lookups._answer import Answer
from relatum_consumer.lookups._by_time import beside, window
from relatum_consumer.lookups._catalog import Catalog, Values
from relatum_consumer.lookups._limits import TIMES_SPANS_MAX, VALUES_MAX
from relatum_consumer.lookups._probe import Order
from relatum_consumer.lookups._related import Itself, Question, answer, without_values
from relatum_consumer.lookups._servers import Servers
from relatum_consumer.lookups._time_search import Moment, Search, Side, Window
from relatum_consumer.lookups._values import VALUES_OF_KEY, Times, times, values_parameters
from relatum_consumer.lookups._waiting import Waiting

Names: TypeAlias = str | Sequence[str] | None
"""One name, several, or None."""

Beside: TypeAlias = Literal["after", "before", "nearest"]

_SIDES: dict[Beside, tuple[Side, ...]] = {
    "after": (Side("after"),),
    "before": (Side("before"),),
    "nearest": (Side("before", inclusive=True), Side("after")),
}


class Lookups:
    """Look-ups in the streams of one virtual host.

    What the arguments mean is told at `Relations`.
    """

    def __init__(self, servers: Servers, vhost: str) -> None:
        self.catalog = Catalog(servers, vhost)

    def values(self, key: str, prefix: str, limit: int) -> tuple[str, ...]:
        """Values of a key that begin with a prefix."""
        checked_count("limit", limit, most=VALUES_MAX)
        if not isinstance(prefix, str) or not _is_beginning(prefix):
            most = f"{KEY_VALUE_BYTES_MAX:,}"
            raise InvalidInput(f"prefix= takes the beginning of a value: text of {most} bytes at most, without NUL")
        definition = self.catalog.definition(key)
        if definition.is_composite:
            raise InvalidInput(f"the values of the key {key!r} have several parts: only single values are listed")
        parameters = values_parameters(self.catalog.vhost, definition.key_id, prefix, limit)
        return tuple(value for (value,) in self.catalog.servers.rows(VALUES_OF_KEY, parameters))

    def related(
        self, message: Message | Consumed, to: Names, by: Names, limit: int | None, order: Order, *, complete: bool
    ) -> Answer:
        """Messages that share a key's value with a message."""
        question = self._question(message, to, by, limit, order)
        return answer(self.catalog, question, complete=complete)

    def wait_related(
        self, message: Message | Consumed, to: Names, by: Names, limit: int | None, order: Order, timeout_s: float
    ) -> Waiting:
        """The same, waiting for the first of them."""
        checked_seconds("timeout_s", timeout_s)
        return Waiting(self.catalog, partial(self._question, message, to, by, limit, order), timeout_s)

    def _question(self, message: Message | Consumed, to: Names, by: Names, limit: int | None, order: Order) -> Question:
        held = in_hand(message)
        names, keys = names_of("to", to), names_of("by", by)
        _check_limit(limit, order)
        wanted, lacking = self.catalog.values_of(held.message, keys)
        return Question(wanted, names, order, limit, itself=Itself(held), lacking=lacking)

    def find(
        self,
        key: str,
        value: Any,
        streams: Names,
        since: datetime | None,
        until: datetime | None,
        limit: int | None,
        order: Order,
        *,
        complete: bool,
    ) -> Answer:
        """Messages that carry a key's value."""
        names = names_of("streams", streams)
        _check_limit(limit, order)
        low, high = span_of(since, until)
        wanted = self.catalog.value_sought(key, value)
        question = Question((wanted,), names, order, limit, low, high)
        return answer(self.catalog, question, complete=complete)

    def times(
        self,
        key: str,
        value: Any,
        streams: Names,
        since: datetime | None,
        until: datetime | None,
        spans: int,
        order: Order,
    ) -> Times:
        """When messages carry a key's value."""
        names = names_of("streams", streams)
        checked_count("spans", spans, most=TIMES_SPANS_MAX)
        _check_limit(None, order)
        low, high = span_of(since, until)
        wanted = self.catalog.value_sought(key, value)
        self.catalog.check_names(names)
        return times(self.catalog, wanted, names, low, high, order, spans)

    def beside(
        self,
        where: Beside,
        moment: Message | Consumed | datetime,
        stream: str,
        by: str | None,
        *,
        inclusive: bool = False,
        complete: bool,
    ) -> Answer:
        """The message next to a moment."""
        at, message = _moment(moment)
        search = self._search(message, stream, by)
        if isinstance(search, Values):
            return without_values(self.catalog, [stream], search.lacking)
        sides = tuple(Side(side.direction, side.inclusive or inclusive) for side in _SIDES[where])
        return beside(search, at, sides, complete=complete)

    def window(
        self,
        moment: Message | Consumed | datetime,
        stream: str,
        before_s: float,
        after_s: float,
        by: str | None,
        *,
        complete: bool,
    ) -> Answer:
        """All messages around a moment."""
        # More than the calendar holds means all of it.
        checked_seconds("before_s", before_s, most=math.inf)
        checked_seconds("after_s", after_s, most=math.inf)
        at, message = _moment(moment)
        search = self._search(message, stream, by)
        if isinstance(search, Values):
            return without_values(self.catalog, [stream], search.lacking)
        span = Window(at.time_us - _microseconds(before_s), at.time_us + _microseconds(after_s), at.id)
        return window(search, span, complete=complete)

    def around(
        self,
        moment: Message | Consumed | datetime,
        streams: Names,
        before_s: float,
        after_s: float,
        limit: int | None,
        *,
        complete: bool,
    ) -> Answer:
        """All messages of many streams around a moment."""
        names = names_of("streams", streams)
        if limit is not None:
            checked_count("limit", limit, otherwise=", or None for all")
        checked_seconds("before_s", before_s, most=math.inf)
        checked_seconds("after_s", after_s, most=math.inf)
        at, _ = _moment(moment)
        span = Window(at.time_us - _microseconds(before_s), at.time_us + _microseconds(after_s), None)
        search = Search(self.catalog, names)
        return window(search, span, complete=complete, nearest=at.time_us, limit=limit)

    def _search(self, message: Message | None, stream: str, by: str | None) -> Search | Values:
        """Where to look; the lack of values where the message has none of the key."""
        if not isinstance(stream, str):
            raise InvalidInput("a look-up by time takes the name of one stream or super stream")
        checked_name("stream", stream)
        if by is None:
            return Search(self.catalog, (stream,))
        if not isinstance(by, str):
            raise InvalidInput("a look-up by time takes one key by its name")
        if message is None:
            raise InvalidInput("by= takes the value from a message; with a datetime, use find(…, since=, until=)")
        values: Values = self.catalog.values_of(message, [by])
        if len(values.wanted) > 1:
            raise InvalidInput(
                f"the message has {len(values.wanted)} values of the key {by!r}, and by= takes one: "
                "find(…, since=, until=) asks for one of them"
            )
        if values.wanted:
            return Search(self.catalog, (stream,), values.wanted[0])
        # No message can share a value that is not there; the stream must exist all the same.
        self.catalog.check_names([stream])
        return values


def names_of(argument: str, names: Names) -> tuple[str, ...] | None:
    """Stream names as given in an argument, each once; None for all."""
    if names is None:
        return None
    if isinstance(names, str):
        return _one_name(argument, names)
    is_several = isinstance(names, Iterable) and not isinstance(names, bytes)
    found = tuple(names) if is_several else ()
    if not found or not all(isinstance(name, str) for name in found):
        raise InvalidInput(f"{argument}= takes a name, several names, or None for all")
    return tuple(dict.fromkeys(checked_name(argument, name) for name in found))


@lru_cache(maxsize=512)
def _one_name(argument: str, name: str) -> tuple[str, ...]:
    return (checked_name(argument, name),)


def _is_beginning(prefix: str) -> bool:
    """Whether a value may begin so."""
    try:
        return len(prefix.encode()) <= KEY_VALUE_BYTES_MAX and "\0" not in prefix
    except UnicodeEncodeError:
        return False


def _check_limit(limit: int | None, order: Order) -> None:
    if limit is not None:
        checked_count("limit", limit, otherwise=", or None for all")
    if order not in get_args(Order):
        raise InvalidInput(f"order= takes one of {', '.join(get_args(Order))}")


def _microseconds(seconds: float) -> int:
    """Seconds in microseconds; more than the calendar holds means all of it."""
    return round(min(seconds * 1_000_000, 2 * TIME_US_MAX))


def time_us_of(moment: Any) -> int:
    """A moment in microseconds since 1970, UTC."""
    if not isinstance(moment, datetime):
        raise InvalidInput(f"a moment is a datetime, not {type(moment).__name__}")
    try:
        return timestamp_us(moment)
    except InvalidValue as error:
        raise InvalidInput(f"no moment between the years 1 and 9999: {error.reason}") from error


def span_of(since: datetime | None, until: datetime | None) -> tuple[int | None, int | None]:
    """The bounds of a span of time in microseconds since 1970, UTC; None where there is none."""
    low, high = _bound("since", since), _bound("until", until)
    if low is not None and high is not None and low > high:
        raise InvalidInput("since= is later than until=, so that no message can lie between them")
    return low, high


def _bound(argument: str, moment: datetime | None) -> int | None:
    try:
        return None if moment is None else time_us_of(moment)
    except InvalidInput as error:
        raise InvalidInput(f"{argument}=: {error}") from error


def _moment(moment: Any) -> tuple[Moment, Message | None]:
    """When to look, and the message whose time that is; None for a datetime."""
    if isinstance(moment, datetime):
        return Moment(time_us_of(moment)), None
    held = in_hand(moment, "a datetime or a message")
    if held.message.time_us is None:
        where = f" at {held.id}" if held.id else ""
        raise InvalidInput(f"the message{where} has no time; ask with a datetime")
    return Moment(held.message.time_us, held.id), held.message
