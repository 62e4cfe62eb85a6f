"""What all commands of `relatum` have in common: options, exit codes, output, and how logs look.

Rooms and packages bring their commands themselves, by the entry-point group `relatum.commands`; `relatum.command` is
the application that finds them.
"""

from relatum.terminal._exits import EPILOG, ExitCode, exit_code_of, stop_signals
from relatum.terminal._log_lines import JsonFormatter, LogFormat, LogLevel, TextFormatter, set_up_logging
from relatum.terminal._messages_shown import message_document, print_messages
from relatum.terminal._moments import FORMS, ReadMoment, SinceOption, UntilOption, parse_moment, read_moment
from relatum.terminal._output import (
    confirm,
    console,
    ending_with_output,
    errors,
    moment_text,
    plain_text,
    print_error,
    print_facts,
    print_json,
    print_rows,
    ranges_text,
    size_text,
    table_of,
)
from relatum.terminal._shared_options import (
    BrokerOption,
    BrokerOptions,
    DatabaseOption,
    JsonOption,
    ServerOptions,
    StreamUrlOption,
    SuperStreamArgument,
    argument,
    option,
    parse_span,
    print_exports,
    require_broker,
    require_database,
    spread,
)

__all__ = [
    "EPILOG",
    "FORMS",
    "BrokerOption",
    "BrokerOptions",
    "DatabaseOption",
    "ExitCode",
    "JsonFormatter",
    "JsonOption",
    "LogFormat",
    "LogLevel",
    "ReadMoment",
    "ServerOptions",
    "SinceOption",
    "StreamUrlOption",
    "SuperStreamArgument",
    "TextFormatter",
    "UntilOption",
    "argument",
    "confirm",
    "console",
    "ending_with_output",
    "errors",
    "exit_code_of",
    "message_document",
    "moment_text",
    "option",
    "parse_moment",
    "parse_span",
    "plain_text",
    "print_error",
    "print_exports",
    "print_facts",
    "print_json",
    "print_messages",
    "print_rows",
    "ranges_text",
    "read_moment",
    "require_broker",
    "require_database",
    "set_up_logging",
    "size_text",
    "spread",
    "stop_signals",
    "table_of",
]
