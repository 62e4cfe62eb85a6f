"""Expectations: which messages must be followed by others, and the report of messages that were not followed."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from relatum.common.checks import checked_name, checked_seconds, meant
from relatum.common.ids import MessageId
from relatum.errors import InvalidInput, KeyNotDefined, NotFound
from relatum.store.catalog import key_definitions
from relatum.store.database import AnyDatabase, as_engine, sql, transaction
from relatum_consumer.lookups.answer import NewKey, Status, to_be_recorded

GRACE_S: Final = 1.0
"""Default grace for clocks, in seconds; the clocks of synchronized machines differ by less."""

GRACE_S_MAX: Final = 86_400.0
"""Highest grace for clocks, in seconds: a day, for a clock that shows local time as UTC."""

UNMET_MAX: Final = 1_000
"""Default maximum number of messages of each kind in a report."""


def exact_span(seconds: float) -> str:
    """Return a time span as text, in the largest unit that gives a whole number: "1 h", "90 s"."""
    units = ((86_400, "d"), (3_600, "h"), (60, "min"))
    size, unit = next((each for each in units if seconds and not seconds % each[0]), (1, "s"))
    return f"{seconds / size:.15g} {unit}"


@dataclass(frozen=True, slots=True)
class Expectation:
    """A rule for each message of a stream: "`orders` are followed by `parcels` with the same `order_id` within 1 h".

    Args:
        name: The expectation's name.
        of: The stream or super stream whose messages must be followed.
        by: The key whose value both messages share.
        follows: The stream or super stream of the following messages; it may be the same as `of`.
        within_s: Maximum seconds between the times of the two messages, more than 0. A message exactly at the limit, or
            with the same time, is in time.
        grace_s: Seconds by which the clocks of publishers, of the broker and of this machine may differ, up to a day. A
            message in another stream counts as following even if it is earlier by up to this span, and a result is
            known only this long after the due time. 0: clocks agree, and an earlier message does not count. Default 1.

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
        """The time limit, in microseconds."""
        return round(self.within_s * 1_000_000)

    @property
    def grace_us(self) -> int:
        """The grace for clocks, in microseconds."""
        return round(self.grace_s * 1_000_000)


class ExpectationResult(StrEnum):
    """What is known about a message that no message followed in time."""

    LATE = "late"
    """Another message followed after the due time; certainly none followed in time."""
    MISSING = "missing"
    """The message is due. Certainly no message followed in time, and no recorded message followed later."""
    NOT_KNOWN = "not_known"
    """It is unknown whether a message followed in time; `UnmetExpectation.why` has the reason."""


class Reason(StrEnum):
    """Why it is not known whether a message was followed."""

    NOT_DUE = "not_due"
    """The due time plus the grace for clocks has not passed yet."""
    BEHIND = "behind"
    """A recorder is behind: the messages up to the due time are not all recorded yet."""
    UNPROVEN = "unproven"
    """Some messages of that time cannot be known: retention has dropped them, the record has a hole, or, perhaps only
    for now, a stream's leader is unreachable."""


@dataclass(frozen=True, slots=True)
class UnmetExpectation:
    """A message that, as far as is known, no message followed in time.

    Attributes:
        finding: Whether the following message is late or missing, or whether that is not known.
        id: The message's stream and offset.
        value: The message's value of the key, in canonical form.
        time: The message's time.
        due: The time by which another message had to follow.
        why: The reason for `NOT_KNOWN`; None for other findings.
        came: The id of the first recorded message that follows late; None if there is none.
        came_at: The time of that late message.
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
    """The messages of a time span that did not meet an expectation. Truthy if any are late or missing.

    Attributes:
        expectation: The expectation that was checked.
        status: `FOUND`: there are late or missing messages. If there are none: `ABSENT`, every due message of the span
            was followed in time; `NOT_RECORDED_YET`, a recorder is behind; `UNPROVEN`, a part of the span cannot be
            known. Messages that are not due yet do not change the status; `words` counts them.
        since: The start of the span; messages are selected by their times.
        until: The end of the span, exclusive.
        late: The first messages that were followed too late, ordered by time, stream and offset, up to the limit;
            `missing` and `not_known` have the same order and limit.
        missing: Messages that no message followed.
        not_known: Messages for which the result is unknown.
        late_count: Number of all messages that were followed too late, regardless of the limit; the same for
            `missing_count` and `not_known_count`.
        not_due_count: How many of the `not_known_count` are not due yet.
        checked: Number of messages in the span that have a value of the key.
        without_value: Number of messages without a value of the key, or with an invalid one: they are not checked.
        unreadable: Number of batches that could not be unpacked; their messages are unknown.
        streams: The streams whose messages were checked; a super stream's partitions, not the super stream.
        unrecorded_streams: Partly recorded streams that no recorder records now: a later call does not help.
        new_keys: The expectation's key, if recorded messages of the `follows` streams are older than the key, and so
            were not recorded for it; `words` names the command that does so.
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
        """Whether the span has messages, and none of them is due yet."""
        # With this status every due message was followed in time, so the unknown ones are those not due.
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
    Status.UNPROVEN: "unproven: some messages cannot be known: they were not recorded, retention has dropped them, or "
    "their stream's leader is unreachable",
    Status.NOT_RECORDED_YET: "not recorded yet: a recorder has not reached the due times",
    Status.FOUND: "not all messages were followed in time",
}

_COLUMNS: Final = ("name", "of_stream", "by_key", "follows", "within_s", "grace_s")
"""The table's columns, in the order of an expectation's fields."""

DEFINED: Final = sql(f"""
    SELECT {", ".join(_COLUMNS)}
    FROM relatum.expectations
    WHERE vhost = :vhost::text
    ORDER BY name""")
"""Reads the expectations of a virtual host, ordered by name."""

# The update changes nothing: it returns, and locks, the expectation that is already defined.
_ADD: Final = sql(f"""
    INSERT INTO relatum.expectations (vhost, {", ".join(_COLUMNS)})
    VALUES (:vhost::text, :name::text, :of_stream::text, :by_key::text, :follows::text, :within_s::double precision,
        :grace_s::double precision)
    ON CONFLICT (vhost, name) DO UPDATE SET name = excluded.name
    RETURNING {", ".join(_COLUMNS)}""")

_REMOVE: Final = sql("DELETE FROM relatum.expectations WHERE vhost = :vhost::text AND name = :name::text")


def add_expectations(
    database: AnyDatabase, wanted: Expectation | Iterable[Expectation], *, vhost: str = "/"
) -> list[Expectation]:
    """Define expectations, which also apply to messages already in the streams. Safe to repeat.

    Args:
        database: PostgreSQL's URL, or a `Database`, which stays open.
        wanted: One or several expectations. An identical expectation that is already defined stays as it is.
        vhost: The virtual host of their streams. Default "/".

    Returns:
        The expectations, in the order given.

    Raises:
        KeyNotDefined: the key of an expectation is not defined; nothing was written.
        InvalidInput: a different expectation of the same name is defined; nothing was written.
    """
    checked_name("vhost", vhost)
    given = list(wanted) if isinstance(wanted, Iterable) else [wanted]
    if not all(isinstance(each, Expectation) for each in given):
        raise InvalidInput("each expectation must be an `Expectation`")
    with as_engine(database) as engine, transaction(engine) as connection:
        names = {key.name for key in key_definitions(connection)}
        for each in given:
            if each.by not in names:
                hint = meant(each.by, names)
                raise KeyNotDefined(f"no key {each.by!r} is defined{hint}: `relatum keys add` defines one", key=each.by)
            row = dict(zip(_COLUMNS, astuple(each), strict=True)) | {"vhost": vhost}
            stored = Expectation(*connection.execute(_ADD, row).one())
            if stored != each:
                raise InvalidInput(
                    f"expectation {each.name!r} is already defined: {stored.meaning}. Use another name, or "
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
    with as_engine(database) as engine, transaction(engine) as connection:
        return [Expectation(*row) for row in connection.execute(DEFINED, {"vhost": vhost})]


def remove_expectation(database: AnyDatabase, name: str, *, vhost: str = "/") -> None:
    """Remove an expectation. Messages and recorded rows stay.

    Args:
        database: As for `add_expectations`.
        name: The expectation's name.
        vhost: As for `add_expectations`.

    Raises:
        NotFound: no expectation of that name is defined.
    """
    checked_name("name", name)
    checked_name("vhost", vhost)
    with as_engine(database) as engine, transaction(engine) as connection:
        if connection.execute(_REMOVE, {"vhost": vhost, "name": name}).rowcount == 0:
            raise not_defined(name, vhost)


def not_defined(name: str, vhost: str, hint: str = "") -> NotFound:
    """Return the error for an unknown name; `hint` suggests the intended name."""
    return NotFound(
        f"no expectation {name!r} is defined for the virtual host {vhost!r}{hint}; see `relatum expect list`"
    )
