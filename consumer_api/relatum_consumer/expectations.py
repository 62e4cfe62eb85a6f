"""Expectations about the messages of a stream, and the report of messages that did not meet an expectation."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

import sqlalchemy as sa

from relatum.common.checks import checked_name, checked_seconds, meant
from relatum.common.ids import MessageId
from relatum.errors import InvalidInput, KeyNotDefined, NotFound
from relatum.store.catalog import key_definitions
from relatum.store.database import AnyDatabase, as_engine, sql
from relatum.store.translation import translated_errors
from relatum_consumer.lookups.answer import NewKey, Status, to_be_recorded

GRACE_S: Final = 1.0
"""Default difference between clocks, in seconds; synchronized machines differ by less."""

GRACE_S_MAX: Final = 86_400.0
"""The most seconds that a clock may be wrong by: a day, as if it took its local time for UTC."""

UNMET_MAX: Final = 1_000
"""Default number of messages of each kind in a report."""


def exact_span(seconds: float) -> str:
    """Return a span of time in the largest unit that gives a whole number: "1 h", "90 s"."""
    units = ((86_400, "d"), (3_600, "h"), (60, "min"))
    size, unit = next((each for each in units if seconds and not seconds % each[0]), (1, "s"))
    return f"{seconds / size:.15g} {unit}"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What follows each message: "`orders` are followed by `parcels` with the same `order_id` within 1 h".

    Args:
        name: The expectation's name.
        of: The stream or super stream whose messages are to be followed.
        by: The key whose value both messages share.
        follows: The stream or super stream of the following messages; it may be the same as `of`.
        within_s: Seconds from the message's time to the following message's, more than 0. A message exactly then, or
            of the same time, is in time.
        grace_s: Seconds by which the clocks of publishers and of the broker may differ, up to a day. A message in
            another stream that is earlier by up to this still counts as following, and results wait for this long after
            the due time. 0: clocks agree, and an earlier message does not count. Default 1.

    Raises:
        InvalidInput: a name or a number of seconds is invalid.
    """

    name: str
    of: str
    by: str
    follows: str
    within_s: float
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        for argument in ("name", "of", "by", "follows"):
            checked_name(argument, getattr(self, argument))
        checked_seconds("within_s", self.within_s, zero=False)
        checked_seconds("grace_s", self.grace_s, most=GRACE_S_MAX)
        object.__setattr__(self, "within_s", float(self.within_s))
        object.__setattr__(self, "grace_s", float(self.grace_s))

    @property
    def meaning(self) -> str:
        """A one-line description."""
        followed = f"{self.of} are followed by {self.follows} with the same {self.by}"
        return f"{followed} within {exact_span(self.within_s)} (clocks may differ by {exact_span(self.grace_s)})"

    @property
    def within_us(self) -> int:
        """The time allowed, in microseconds."""
        return round(self.within_s * 1_000_000)

    @property
    def grace_us(self) -> int:
        """The allowed difference between clocks, in microseconds."""
        return round(self.grace_s * 1_000_000)


class ExpectationResult(StrEnum):
    """What is known about a message that nothing followed in time."""

    LATE = "late"
    """A message followed after the due time, and certainly none before."""
    MISSING = "missing"
    """It is due; certainly none followed in time, nor later among the recorded messages."""
    NOT_KNOWN = "not_known"
    """The answer is unknown; `UnmetExpectation.why` says why."""


class Reason(StrEnum):
    """Why it is not known whether a message was followed."""

    NOT_DUE = "not_due"
    """The due time has not passed, or not by more than the grace for clocks."""
    BEHIND = "behind"
    """The messages up to the due time are not all recorded yet."""
    UNPROVEN = "unproven"
    """The messages of that time can never be known, or not now: retention has dropped them, a hole in the record was
    left, or a stream's leader is unreachable."""


@dataclass(frozen=True, slots=True)
class UnmetExpectation:
    """One message that, as far as is known, nothing followed in time.

    Attributes:
        finding: Late, missing, or not known.
        id: The message's stream and offset.
        value: Its value of the key, in canonical form.
        time: Its time.
        due: The time by which the other message was expected.
        why: With `NOT_KNOWN`, why; else None.
        came: The id of the first message that followed anyway; None if there is none.
        came_at: The time of that message.
    """

    finding: ExpectationResult
    id: MessageId
    value: str
    time: datetime
    due: datetime
    why: Reason | None = None
    came: MessageId | None = None
    came_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingReport:
    """The messages of a time span that did not meet an expectation. Truthy if there are late or missing ones.

    Attributes:
        expectation: The expectation.
        status: `FOUND`: there are late or missing messages. If there are none: `ABSENT`, every due message of the span
            was followed in time; `NOT_RECORDED_YET`, a recorder is behind; `UNPROVEN`, a part cannot be known.
            Messages that are not due yet do not change it: `words` counts them.
        since: The start of the span; messages are selected by their times.
        until: The end of the span, exclusive.
        late: The first messages that were followed too late, by time, stream and offset, up to the limit; `missing` and
            `not_known` are ordered and limited likewise.
        missing: Messages that none followed.
        not_known: Messages for which the answer is unknown.
        late_count: How many were followed too late, without the limit; `missing_count` and `not_known_count` likewise.
        not_due_count: How many of the `not_known_count` are not due yet.
        checked: How many messages of the span have a value of the key.
        without_value: How many have none, or one that cannot be recorded: nothing is expected of them.
        unreadable: How many batches could not be unpacked; their messages are unknown.
        streams: The streams whose messages were checked; a super stream's partitions, not the super stream.
        unrecorded_streams: Partly recorded streams that no recorder records now: asking later does not help.
        new_keys: The key, if it is newer than the recorded messages of the following streams, so that a part is
            unknown: `words` names the command that records it.
    """

    expectation: Expectation
    status: Status
    since: datetime
    until: datetime
    late: tuple[UnmetExpectation, ...] = ()
    missing: tuple[UnmetExpectation, ...] = ()
    not_known: tuple[UnmetExpectation, ...] = ()
    late_count: int = 0
    missing_count: int = 0
    not_known_count: int = 0
    not_due_count: int = 0
    checked: int = 0
    without_value: int = 0
    unreadable: int = 0
    streams: tuple[str, ...] = ()
    unrecorded_streams: tuple[str, ...] = ()
    new_keys: tuple[NewKey, ...] = ()

    def __bool__(self) -> bool:
        return self.status is Status.FOUND

    @property
    def is_early(self) -> bool:
        """Whether there are messages, and none of them is due yet."""
        # All due messages are known: otherwise the status would be another one.
        return self.status is Status.ABSENT and 0 < self.checked <= self.not_known_count

    @property
    def words(self) -> str:
        """The status, for people to read."""
        if self.status is not Status.ABSENT:
            return "; ".join(filter(None, (_WORDS[self.status], to_be_recorded((), self.new_keys))))
        if not self.checked:
            return "no messages in this span, so nothing was checked"
        if not self.not_known_count:
            return _WORDS[self.status]
        if self.is_early:
            return f"nothing is missing so far: there is time left ({self.not_known_count:,} are not due yet)"
        return f"{_WORDS[self.status]}; {self.not_known_count:,} are not due yet"


_WORDS: Final = {
    Status.ABSENT: "nothing is missing: every message that was due was followed in time",
    Status.UNPROVEN: "unproven: a part of what was due cannot be known: not recorded, dropped by retention, or of a "
    "stream whose leader cannot be reached",
    Status.NOT_RECORDED_YET: "not recorded yet: a recorder is behind with what was due",
    Status.FOUND: "not all were followed in time",
}


_COLUMNS: Final = ("name", "of_stream", "by_key", "follows", "within_s", "grace_s")
"""The columns, in the order of an expectation's fields."""

DEFINED: Final = sql(
    f"""
    SELECT {", ".join(_COLUMNS)}
    FROM relatum.expectations
    WHERE vhost = :vhost::text
    ORDER BY name
    """
)
"""Reads the expectations of a virtual host, ordered by name."""


_ADD: Final = sql("""
    INSERT INTO relatum.expectations (vhost, name, of_stream, by_key, follows, within_s, grace_s)
    VALUES (:vhost::text, :name::text, :of_stream::text, :by_key::text, :follows::text, :within_s::double precision,
        :grace_s::double precision)
    ON CONFLICT DO NOTHING""")

_REMOVE: Final = sql("DELETE FROM relatum.expectations WHERE vhost = :vhost::text AND name = :name::text")


def add_expectations(
    database: AnyDatabase, wanted: Expectation | Iterable[Expectation], *, vhost: str = "/"
) -> list[Expectation]:
    """Define expectations. They also apply to messages already in the streams.

    Args:
        database: PostgreSQL's URL, or a `Database`, which stays open.
        wanted: One or several expectations. An identical expectation that is already defined is kept.
        vhost: The virtual host of their streams.

    Returns:
        The expectations, in the order given.

    Raises:
        KeyNotDefined: the key of an expectation is not defined; nothing was written.
        InvalidInput: another expectation of the same name is defined; nothing was written.
    """
    checked_name("vhost", vhost)
    given = [wanted] if isinstance(wanted, Expectation) else list(wanted)
    if not all(isinstance(each, Expectation) for each in given):
        raise InvalidInput("each expectation must be an `Expectation`")
    with as_engine(database) as engine, translated_errors(), engine.begin() as connection:
        names = {key.name for key in key_definitions(connection)}
        for each in given:
            if each.by not in names:
                raise KeyNotDefined(f"no key {each.by!r} is defined{meant(each.by, names)}", key=each.by)
            row = dict(zip(_COLUMNS, astuple(each), strict=True)) | {"vhost": vhost}
            connection.execute(_ADD, row)
        stored = {each.name: each for each in _stored(connection, vhost)}
        for each in given:
            if stored[each.name] != each:
                raise InvalidInput(
                    f"expectation {each.name!r} is already defined: {stored[each.name].meaning}. Use another name, or "
                    "remove it first (`relatum expect remove`)"
                )
    return given


def defined_expectations(database: AnyDatabase, *, vhost: str = "/") -> list[Expectation]:
    """Return the expectations of a virtual host, ordered by name.

    Args:
        database: As for `add_expectations`.
        vhost: As for `add_expectations`.
    """
    checked_name("vhost", vhost)
    with as_engine(database) as engine, translated_errors(), engine.connect() as connection:
        return _stored(connection, vhost)


def remove_expectation(database: AnyDatabase, name: str, *, vhost: str = "/") -> None:
    """Remove an expectation; the messages and their rows stay.

    Args:
        database: As for `add_expectations`.
        name: The expectation's name.
        vhost: As for `add_expectations`.

    Raises:
        NotFound: no expectation of that name is defined.
    """
    checked_name("name", name)
    checked_name("vhost", vhost)
    with as_engine(database) as engine, translated_errors(), engine.begin() as connection:
        if connection.execute(_REMOVE, {"vhost": vhost, "name": name}).rowcount == 0:
            raise not_defined(name, vhost)


def not_defined(name: str, vhost: str, hint: str = "") -> NotFound:
    """Return the error for an unknown name; `hint` suggests the intended name."""
    return NotFound(
        f"no expectation {name!r} is defined for the virtual host {vhost!r}{hint}; see `relatum expect list`"
    )


def _stored(connection: sa.Connection, vhost: str) -> list[Expectation]:
    return [Expectation(*row) for row in connection.execute(DEFINED, {"vhost": vhost})]
