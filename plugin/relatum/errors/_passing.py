"""Errors that pass: the call is safe to repeat. See `relatum.errors`."""

from typing import Any

from relatum.errors._root import RelatumError


class Transient(RelatumError):
    """Something that passes; the call is safe to repeat."""


class BrokerUnavailable(Transient):
    """The broker does not answer."""


class ConnectionLost(BrokerUnavailable):
    """The connection to the broker ended while in use."""


class StreamUnavailable(BrokerUnavailable):
    """The stream moves to another node, or was deleted, under a reader (field `stream`)."""

    stream: str


class StreamNotHere(StreamUnavailable):
    """No node that can be reached from here has a replica of the stream that answers (field `stream`).

    It moves, or its nodes are down or advertise names that cannot be reached from here.
    """

    offset: int


class DatabaseUnavailable(Transient):
    """PostgreSQL does not answer, or takes nothing now.

    Field `reason`: `read_only` (a standby, or default_transaction_read_only; nothing was written), `target` (no host is
    as target_session_attrs asks), `disk_full`, `connections` (too many are open), `pool` (none of ours became free),
    `timeout` (no answer within a time-out, which the message names), `starting`, `stopping`, `name` (the host's name
    does not resolve), or None: no answer.
    """

    reason: str | None = None


class ReadTimeout(Transient):
    """No answer came in time."""


class ConnectionsInUse(Transient):
    """All connections that a reader may have to the broker are in use, and none became free in time; nothing was asked.

    Fields: `limit` (the option `connections_max`), `waiting` (calls that waited for one, this one included).
    """

    limit: int
    waiting: int


class NotRecordedInTime(Transient):
    """The message is confirmed, but its rows were not there in time; waiting again is fine.

    Fields: `found` (the places known so far), `in_stream` (True, or None where it may have gone to other queues only).
    """

    found: tuple[Any, ...] = ()
    in_stream: bool | None = True


class NotFinishedInTime(Transient):
    """The outcome of a message was not final in time; waiting again is fine.

    Field: `outcome` (what is known so far, "unknown" where no collector has taken the message).
    """

    outcome: Any


class ContextMoving(Transient):
    """A move of the message's context did not end in time; nothing was sent.

    Fields: `context`, `move_id`. Whoever finds a move that nobody goes on with can complete or abort it.
    """

    context: str
    move_id: int


class TooManyOpenSets(Transient):
    """No further affinity set can be opened until others are closed; nothing was sent.

    Fields: `open_sets`, `open_sets_max`.
    """

    open_sets: int
    open_sets_max: int
