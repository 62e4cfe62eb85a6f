"""Whether what look-ups need answers: asked anew, and quickly."""

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final

from relatum.errors import RelatumError
from relatum.store.catalog import KEYS_IN_FORCE
from relatum_consumer.lookups._requests import InTime, LookupRequest, Missing, Reach, Select, Steps
from relatum_consumer.lookups._waiting import OutOfTime

_ASKED_FOR: Final = "relatum"
"""A stream that need not be there: the broker is asked whether it is, and any answer will do."""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether both servers answer.

    Attributes:
        database: What is wrong with PostgreSQL; empty where it answers, and the tables are there and may be read.
        broker: What is wrong with the broker; empty where it answers.
    """

    database: str = ""
    broker: str = ""

    @property
    def is_well(self) -> bool:
        """Whether look-ups can be answered."""
        return not self.database and not self.broker


def database_steps() -> Steps[None]:
    """Ask the database for what every look-up needs."""
    yield from Select(KEYS_IN_FORCE, {})


def broker_steps() -> Steps[None]:
    """Ask the broker something harmless."""
    yield from Reach()
    yield from Missing([_ASKED_FOR])


def health(timeout_s: float) -> Steps[Health]:
    """Ask both, each for half of the time at most."""
    database = yield from _wrong(database_steps(), timeout_s / 2)
    return Health(database, (yield from _wrong(broker_steps(), timeout_s / 2)))


def reached() -> Steps[None]:
    """Ask both; the error of what does not answer is raised."""
    yield from database_steps()
    yield from broker_steps()


def _wrong(steps: Steps[None], within_s: float) -> Generator[LookupRequest, Any, str]:
    try:
        yield from InTime(steps, time.monotonic() + within_s)
    except OutOfTime as out:
        error: Exception = out.error
    except RelatumError as met:
        error = met
    else:
        return ""
    return f"{type(error).__name__}: {error}"
