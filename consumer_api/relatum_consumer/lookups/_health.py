"""Whether what look-ups need answers: asked anew, and quickly."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from relatum.errors import RelatumError
from relatum.store.catalog import KEYS_IN_FORCE
from relatum.waiting import within
from relatum_consumer.lookups._servers import Servers

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


def health(servers: Servers, timeout_s: float) -> Health:
    """Ask both, each for half of the time at most."""
    return Health(_wrong(servers, _ask_database, timeout_s / 2), _wrong(servers, _ask_broker, timeout_s / 2))


def reached(servers: Servers) -> None:
    """Ask both; the error of what does not answer is raised."""
    _ask_database(servers)
    _ask_broker(servers)


def _ask_database(servers: Servers) -> None:
    """Ask for what every look-up needs."""
    servers.rows(KEYS_IN_FORCE, {})


def _ask_broker(servers: Servers) -> None:
    """Ask something harmless."""
    servers.reach()
    servers.missing([_ASKED_FOR])


def _wrong(servers: Servers, ask: Callable[[Servers], None], within_s: float) -> str:
    try:
        with within(within_s):
            ask(servers)
    except RelatumError as error:
        return f"{type(error).__name__}: {error}"
    return ""
