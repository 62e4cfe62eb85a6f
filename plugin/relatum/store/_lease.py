"""Leases: who holds something now, by the database's clock. The same for everything that is held.

A lease only says who is at work, so that others need not try: it saves work, and nothing rests on it. Its clock may
jump, its holder may be frozen between two statements and go on an hour later, believing what it believed. So whoever
writes what it holds is fenced, by what is written and in the statement that writes, each in the way that fits:

- a recorder by the coverage's end, which moves by compare-and-set;
- a serial consumer's position, and a collector's, by the member its row names and the version, or position, it had;
- a claim on a group by its number, which each new claim raises;
- a step of a move by the move's state and attempt.

One that was frozen and comes back learns by that that another has gone on, and never by asking a clock of its own.
Source: docs/adr/0017.
"""

from typing import Any, Final

import sqlalchemy as sa

LEASE_S: Final = 5.0
"""How long a lease holds without renewal, by default, in seconds."""

RENEWALS: Final = 3
"""How often a lease is renewed while it holds. Tests set it high, so that a long lease has a quick rhythm."""


def renewal_s(lease_s: float) -> float:
    """Seconds between two renewals of a lease."""
    return lease_s / RENEWALS


def interval(seconds: Any) -> "sa.ColumnElement[Any]":
    """So many seconds, as a span of time that moments are counted by."""
    nothing: list[Any] = [sa.literal_column("0")] * 6  # No parameters: the text alone is what some prepare.
    return sa.func.make_interval(*nothing, seconds)


RENEWED: Final = "lease_expires_at = clock_timestamp() + make_interval(secs => :lease_s::double precision)"
"""Sets a lease that holds for `lease_s` seconds from now, in an UPDATE."""
