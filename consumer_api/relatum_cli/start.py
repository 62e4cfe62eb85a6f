"""The console script: at any moment, Ctrl-C ends `relatum` with code 130 and without a traceback.

A command's imports take a second. Ctrl-C would print a traceback then, and also while the interpreter ends. So this
module imports none of them, and its signal handler ends the process at once before and after the command. While the
command runs, Ctrl-C is a `KeyboardInterrupt` as usual, so that open resources are closed.
"""

import os
import signal
import sys
from contextlib import suppress
from typing import Any, Final

INTERRUPTED: Final = 130
"""The exit code after Ctrl-C: 128 + SIGINT, as in shells."""


def main() -> None:
    """Run the command with the process's arguments, and end the process."""
    # Otherwise SIGINT is ignored, as in a script's background job, or another handler is set.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, _leave)
        sys.unraisablehook = _unraisable
    try:
        from relatum_cli.app import main as run

        # The application calls it once the command is imported.
        run(_interruptible if is_default else None)
    except KeyboardInterrupt:
        _leave()
    finally:
        if is_default:
            signal.signal(signal.SIGINT, _leave)


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _unraisable(unraisable: Any) -> None:
    """End the process on Ctrl-C during finalisation, where the interpreter would print a traceback and continue."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _leave()
    sys.__unraisablehook__(unraisable)


def _leave(*_: Any) -> None:
    """End the process at once. Work in progress is left as after a kill, which loses and doubles nothing."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(INTERRUPTED)
