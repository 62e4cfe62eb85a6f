"""How a command ends: exit codes, each for one thing a caller can do, and the signals that stop it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Final

from relatum import errors


class ExitCode(IntEnum):
    """What the command ends with. The same for all subcommands."""

    OK = 0
    FAILED = 1
    """Something nobody foresaw: a defect of Relatum, with its traceback."""
    USAGE = 2
    """A wrong option or argument, or a value that cannot be a key's: nothing was done."""
    CONFIGURATION = 3
    """A URL, a missing schema, a refused user, an installation; or nothing is recorded that could be looked in."""
    BROKER = 4
    """RabbitMQ does not answer; repeat it later."""
    DATABASE = 5
    """PostgreSQL does not answer, or takes no connection or no writes now; repeat it later."""
    NOT_THERE = 6
    """No such stream, message, key or group; or a look-up whose answer is `absent` or `expired`."""
    DIFFERENT = 7
    """What was compared differs, a stream is not the one that was recorded, or a group contradicts itself."""
    NOT_YET = 8
    """A look-up met messages that are not recorded yet (repeat it later or ask with `--complete`), an outcome is not
    final yet, or a group is not complete."""
    DATA = 9
    """Bytes in a stream that are not what they should be."""
    UNSUCCESSFUL = 10
    """A message that was asked for failed, or is in the dead-letter stream; or nothing followed one in time."""
    UNPROVEN = 11
    """A look-up whose answer is `unproven`: nobody can prove from here that there is nothing, or nothing more."""
    DECLINED = 12
    """The command asked, and nobody said yes: nothing was done."""
    OUTPUT = 13
    """Stdout cannot be written, as on a disk that is full. What the command does was done."""
    CLOSED = 141
    """Whoever read stdout had enough, as `head` has: 128 + SIGPIPE, as shells have it. Nothing is said of it."""


# The first class that fits counts, so leaves stand before their parents.
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


EPILOG: Final = (
    "Exit codes: 0 done; 1 unexpected; 2 wrong usage; 3 configuration; 4 broker; 5 database; "
    "6 not there; 7 different; 8 not recorded or not finished yet; 9 bad data; 10 failed or dead; "
    "11 unproven; 12 declined; 13 stdout cannot be written; 141 its reader had enough."
)


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; a second one of them ends the process as usual."""
    stop = threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}

    def on_signal(*_: object) -> None:
        stop.set()
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in numbers:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
