"""How a command ends: exit codes, each for one thing a caller can do, and the signals that stop it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Final

from relatum import errors


class ExitCode(IntEnum):
    """What the command ends with. The same for all subcommands; docs/commands.md says more of each."""

    OK = 0
    FAILED = 1  # a defect of Relatum, with its traceback
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
    CLOSED = 141  # 128 + SIGPIPE, as shells have it


EPILOG: Final = (
    "Exit codes: 0 done; 1 unexpected; 2 wrong usage; 3 configuration; 4 broker; 5 database; "
    "6 not there; 7 different; 8 not recorded or not finished yet; 9 bad data; 10 failed or dead; "
    "11 unproven; 12 declined; 13 stdout cannot be written; 141 its reader had enough."
)

# The first class that fits counts, so leaves come before their parents.
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
    """The exit code that tells a script what kind of error it was."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.FAILED)


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; a second one of them ends the process as usual."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def as_before() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(*_: object) -> None:
        stop.set()
        as_before()

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        as_before()
