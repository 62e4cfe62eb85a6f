"""Exit codes, one for each way a caller can react, and the signals that stop a command."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Final

from relatum import errors


class ExitCode(IntEnum):
    """The exit codes of all subcommands; docs/commands.md explains each."""

    OK = 0
    FAILED = 1  # a bug in Relatum; the traceback is printed
    USAGE = 2
    CONFIGURATION = 3
    BROKER = 4
    DATABASE = 5
    NOT_THERE = 6
    DIFFERENT = 7
    NOT_YET = 8
    DATA = 9
    UNSUCCESSFUL = 10
    UNPROVEN = 11
    DECLINED = 12
    OUTPUT = 13
    CLOSED = 141  # 128 + SIGPIPE, as in shells


EPILOG: Final = (
    "Exit codes: 0 done; 1 unexpected; 2 wrong usage; 3 configuration; 4 broker; 5 database; "
    "6 not found; 7 different; 8 not recorded or not finished yet; 9 bad data; 10 failed or dead; "
    "11 unproven; 12 declined; 13 stdout cannot be written; 141 the reader of stdout closed it."
)

# The first matching class counts, so subclasses come before their base classes.
_CODES: Final[tuple[tuple[type[errors.RelatumError], ExitCode], ...]] = (
    (errors.InvalidInput, ExitCode.USAGE),
    (errors.KeyDefinitionConflict, ExitCode.USAGE),
    (errors.ConfigurationError, ExitCode.CONFIGURATION),
    (errors.AccessRefused, ExitCode.CONFIGURATION),
    (errors.DatabaseUnavailable, ExitCode.DATABASE),
    (errors.NotRecordedInTime, ExitCode.NOT_YET),
    (errors.NotFinishedInTime, ExitCode.NOT_YET),
    (errors.Transient, ExitCode.BROKER),
    (errors.PublishError, ExitCode.BROKER),
    (errors.NotFound, ExitCode.NOT_THERE),
    (errors.Conflict, ExitCode.DIFFERENT),
    (errors.DataError, ExitCode.DATA),
)


def exit_code_of(error: errors.RelatumError) -> ExitCode:
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.FAILED)


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM, SIGINT and the block's end set. A second signal has its usual effect."""
    stop = threading.Event()
    usual = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def end(*_: object) -> None:
        stop.set()
        for number, handler in usual.items():
            signal.signal(number, handler)

    for number in usual:
        signal.signal(number, end)
    try:
        yield stop
    finally:
        end()
