"""Logs of commands, on stderr: as text for people, or as JSON for programs."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias

LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""The attributes of every log record; all other attributes are fields, from `extra`."""


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


def _at(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, message, fields, and an error's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _at(record), "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage(), **_extra(record)}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """Formats a record as text: time, level, message, then fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _extra(record).items())
        line = f"{_at(record)} {record.levelname.lower():7} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up_logging(log_format: LogFormat, level: LogLevel) -> None:
    """Send the logs of this process to stderr: Relatum's from a level on, those of other packages from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # Relatum's errors and logs report the failures that pika logs, too.
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    logging.getLogger("relatum").setLevel(level.upper())
