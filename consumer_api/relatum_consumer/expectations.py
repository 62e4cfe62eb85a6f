"""What is expected of the messages of a stream, and what an answer says of those it was not met for."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

import sqlalchemy as sa

from relatum.checks import checked_name, checked_seconds, meant
from relatum.errors import InvalidInput, KeyNotDefined, NotFound
from relatum.ids import MessageId
from relatum.store.catalog import key_definitions
from relatum.store.database import AnyDatabase, as_engine, sql
from relatum.store.translation import translated_errors
from relatum_consumer.lookups.answer import NewKey, Status, to_be_recorded

GRACE_S: Final = 1.0
"""Seconds by which clocks may differ, unless told otherwise: machines that are kept in step differ by less."""

GRACE_S_MAX: Final = 86_400.0
"""Seconds that anybody's clock may be wrong by: a day, as of one that takes its own zone's time for UTC."""

UNMET_MAX: Final = 1_000
"""Messages of each finding that a report holds, unless told otherwise."""

POLL_S: Final = 1.0
"""Seconds between a follower's looks, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What comes after each message: "`orders` are followed by `payments` with the same `order_id` within 1 h".

    Args:
        name: What it is asked for by.
        of: The stream or super stream whose messages are to be followed.
        by: The key whose value both messages share.
        follows: The stream or super stream in which the other message is to come; it may be the same one.
        within_s: Seconds from the message's time to that of the other, more than 0. One that comes just then is in
            time, and so is one of the same time.
        grace_s: Seconds by which the clocks of publishers and of the broker may differ, up to a day. One in another
            stream that is by so much earlier follows all the same; and nothing is said until so much later than it
            was due. 0: clocks agree, and one of an earlier time follows nothing. Default 1.

    Raises:
        InvalidInput: a name or a number of seconds cannot be one.
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
        return f"{followed} within {self.within_s:g} s (clocks may differ by {self.grace_s:g} s)"

    @property
    def within_us(self) -> int:
        """The time allowed, in microseconds."""
        return round(self.within_s * 1_000_000)

    @property
    def grace_us(self) -> int:
        """By how much clocks may differ, in microseconds."""
        return round(self.grace_s * 1_000_000)


class ExpectationResult(StrEnum):
    """What is known of a message that nothing has followed in time."""

    LATE = "late"
    """One came after it was due, and surely none before."""
    MISSING = "missing"
    """It is due, and surely none came up to then, nor any later as far as is recorded."""
    NOT_KNOWN = "not_known"
    """Nobody can say; `UnmetExpectation.why` says why."""


class Reason(StrEnum):
    """Why it is not known whether a message was followed."""

    NOT_DUE = "not_due"
    """There is time left; or so little is over that clocks may differ by it."""
    BEHIND = "behind"
    """What came up to the moment it was due is not all recorded yet."""
    UNPROVEN = "unproven"
    """What came in that time can never be known, or not from here: retention has dropped it, a hole was torn before
    it was recorded, or a stream's leader cannot be reached."""


@dataclass(frozen=True, slots=True)
class UnmetExpectation:
    """One message that, as far as is known, nothing has followed in time.

    Attributes:
        finding: Late, missing, or not known.
        id: Where the message is.
        value: Its value of the key, in canonical form.
        time: Its time.
        due: Until when the other message was to come.
        why: With `NOT_KNOWN`, why; else None.
        came: Where the first message is that followed all the same; None where there is none.
        came_at: The time of that one.
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
    """What an expectation was not met for in a span of time, and how sure that is. It is true where there is anything.

    Attributes:
        expectation: What was expected.
        status: `FOUND`: there are late or missing ones. Without any: `ABSENT`, every message of the span that is due
            was followed in time; `NOT_RECORDED_YET`, a recorder is behind with what is due; `UNPROVEN`, a part of it
            cannot be known. Messages that are not due yet change nothing: the words say how many.
        since: The beginning of the span, in which messages are looked at by their times.
        until: Its end; a message of this time is behind it.
        late: The first of those that came too late, in order of time, stream and offset, up to the limit; so are
            `missing` and `not_known`.
        missing: Those for which none came.
        not_known: Those of which nobody can say.
        late_count: How many came too late, whatever the limit; so are `missing_count` and `not_known_count`.
        checked: Messages of the span that have a value of the key.
        without_value: Messages of the span that have none, or one that cannot be recorded: nothing is expected of them.
        unreadable: Batches met that cannot be unpacked; nothing is known of what is in them.
        streams: The streams whose messages were looked at; a super stream's partitions, not itself.
        unrecorded_streams: Streams of which a part is not recorded and that nobody records now: asking later does not
            help.
        new_keys: The key, where it is newer than what is recorded of the streams that follow, and a part is therefore
            not known: the words say which command has it.
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
        # Of those that are due all is known: else it would be another status.
        return self.status is Status.ABSENT and 0 < self.checked <= self.not_known_count

    @property
    def words(self) -> str:
        """Its status, for a person."""
        if self.status is not Status.ABSENT:
            return "; ".join(filter(None, (_WORDS[self.status], to_be_recorded((), self.new_keys))))
        if not self.checked:
            return "no messages in this span, so nothing was looked at"
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
"""In the order of an expectation's fields."""

DEFINED: Final = sql(
    f"""
    SELECT {", ".join(_COLUMNS)}
    FROM relatum.expectations
    WHERE vhost = :vhost::text
    ORDER BY name
    """
)
"""The expectations of a virtual host, in the order of their names."""


_ADD: Final = sql("""
    INSERT INTO relatum.expectations (vhost, name, of_stream, by_key, follows, within_s, grace_s)
    VALUES (:vhost::text, :name::text, :of_stream::text, :by_key::text, :follows::text, :within_s::double precision,
        :grace_s::double precision)
    ON CONFLICT DO NOTHING""")

_REMOVE: Final = sql("DELETE FROM relatum.expectations WHERE vhost = :vhost::text AND name = :name::text")


def add_expectations(
    database: AnyDatabase, wanted: Expectation | Iterable[Expectation], *, vhost: str = "/"
) -> list[Expectation]:
    """Define expectations. Messages that are in the streams already are looked at, too.

    Args:
        database: PostgreSQL's URL, or a `Database`, which stays open.
        wanted: One, or several. One that is defined already and says the same is kept.
        vhost: The virtual host of their streams.

    Returns:
        Them, in the order given.

    Raises:
        KeyNotDefined: no key of the name of one is in force; nothing was written.
        InvalidInput: one of that name says something else; nothing was written.
    """
    checked_name("vhost", vhost)
    given = [wanted] if isinstance(wanted, Expectation) else list(wanted)
    if not all(isinstance(each, Expectation) for each in given):
        raise InvalidInput("expectations are given as `Expectation`s")
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
                    f"expectation {each.name!r} is defined already: {stored[each.name].meaning}. Use another name, or "
                    "remove it first (`relatum expect remove`)"
                )
    return given


def defined_expectations(database: AnyDatabase, *, vhost: str = "/") -> list[Expectation]:
    """The expectations of a virtual host, in the order of their names.

    Args:
        database: As for `add_expectations`.
        vhost: As for `add_expectations`.
    """
    checked_name("vhost", vhost)
    with as_engine(database) as engine, translated_errors(), engine.connect() as connection:
        return _stored(connection, vhost)


def remove_expectation(database: AnyDatabase, name: str, *, vhost: str = "/") -> None:
    """Take an expectation back; the messages and their rows stay as they are.

    Args:
        database: As for `add_expectations`.
        name: Its name.
        vhost: As for `add_expectations`.

    Raises:
        NotFound: none of that name is defined.
    """
    checked_name("name", name)
    checked_name("vhost", vhost)
    with as_engine(database) as engine, translated_errors(), engine.begin() as connection:
        if connection.execute(_REMOVE, {"vhost": vhost, "name": name}).rowcount == 0:
            raise not_defined(name, vhost)


def not_defined(name: str, vhost: str, hint: str = "") -> NotFound:
    """The error for a name that no expectation has; `hint`: what may be meant."""
    return NotFound(
        f"no expectation {name!r} is defined for the virtual host {vhost!r}{hint}; see `relatum expect list`"
    )


def _stored(connection: sa.Connection, vhost: str) -> list[Expectation]:
    return [Expectation(*row) for row in connection.execute(DEFINED, {"vhost": vhost})]
