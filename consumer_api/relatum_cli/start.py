"""The console script: at any moment, Ctrl-C ends `relatum` with code 130 and without a traceback.

Python would print a traceback if Ctrl-C came while a command is imported, which takes a second, or while the
interpreter ends. So this module imports no command, and its signal handler ends the process immediately, before and
after the command. While the command runs, Ctrl-C raises `KeyboardInterrupt` as usual, so that resources are closed.
"""

import os
import signal
import sys
from contextlib import suppress
from functools import partial
from typing import Any


def main() -> None:
    """Run the command with the process's arguments, and end the process."""
    # Any other handler stays: SIGINT may be ignored, as in a script's background job.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, _exit)
        sys.unraisablehook = _unraisable
    try:
        from relatum_cli.app import main as run

        # The application calls its argument after it has imported the command.
        run(partial(signal.signal, signal.SIGINT, signal.default_int_handler) if is_default else None)
    except KeyboardInterrupt:
        _exit()
    finally:
        if is_default:
            signal.signal(signal.SIGINT, _exit)


def _unraisable(unraisable: Any) -> None:
    """End the process on Ctrl-C while the interpreter ends, when Python would print a traceback and continue."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _exit()
    sys.__unraisablehook__(unraisable)


def _exit(*_: Any) -> None:
    """End the process immediately. As after a kill, no message is lost or duplicated."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(130)  # 128 + SIGINT, as in shells
