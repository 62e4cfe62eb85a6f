"""The console script: whatever `relatum` does at the moment, Ctrl-C ends it with 130, and without a traceback.

What a command needs takes a second to import, where Ctrl-C would be a traceback, and so it would be while the
interpreter ends. So this module imports nothing of it, and before and after the command ends the process by itself. In
between, Ctrl-C is a `KeyboardInterrupt` as ever: what is open is closed.
"""

import os
import signal
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

INTERRUPTED: Final = 130
"""What a command ends with after Ctrl-C: 128 + SIGINT, as shells have it."""


def main() -> None:
    """Run the command on the process's arguments and end the process."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        # Ignored, as in the background of a script, or somebody else's.
        _run()
        return
    signal.signal(signal.SIGINT, _leave)
    before = sys.excepthook

    def quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            _leave()
        before(kind, error, trace)

    # Before Typer is imported, which calls what it finds.
    sys.excepthook = quietly
    sys.unraisablehook = _unraisable
    try:
        _run(interruptible=True)
    except KeyboardInterrupt:
        _leave()
    finally:
        signal.signal(signal.SIGINT, _leave)


def _run(*, interruptible: bool = False) -> None:
    from relatum_cli.app import main as run

    # Called when the command that is run is imported, too.
    run(_interruptible if interruptible else None)


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _unraisable(unraisable: Any) -> None:
    """Ctrl-C that came while an object was finalised is dropped by the interpreter, with a traceback: leave instead."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _leave()
    sys.__unraisablehook__(unraisable)


def _leave(*_: Any) -> None:
    """End the process at once. Whatever is under way is as after a kill, which loses and doubles nothing."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(INTERRUPTED)
