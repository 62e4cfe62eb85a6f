"""The command `relatum`.

The kernel's own commands are here. Commands of the packages above it (`migrate`, `find`, `spark`, …) are
found through the entry-point group `relatum.commands`: the kernel imports none of them.
"""

from relatum.command._app import complete_app, main
from relatum.command._exits import ExitCode, exit_code_of
from relatum.command._messages import message_document, print_messages
from relatum.command._options import (
    BrokerOption,
    DatabaseOption,
    JsonOption,
    StreamUrlOption,
    parse_span,
    require_broker,
    require_database,
)
from relatum.command._output import console, errors, print_json
from relatum.command._reports import exit_with, offsets_bar, print_backfilled, print_verified, verified_document

__all__ = [
    "BrokerOption",
    "DatabaseOption",
    "ExitCode",
    "JsonOption",
    "StreamUrlOption",
    "complete_app",
    "console",
    "errors",
    "exit_code_of",
    "exit_with",
    "main",
    "message_document",
    "offsets_bar",
    "parse_span",
    "print_backfilled",
    "print_json",
    "print_messages",
    "print_verified",
    "require_broker",
    "require_database",
    "verified_document",
]
