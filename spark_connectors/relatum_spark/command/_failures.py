"""Errors as Spark hands them on, made Relatum's again.

What a task or a data source raises reaches the driver as text within an error of Spark's own.
"""

import re
from typing import Final

from relatum import errors
from relatum.errors import RelatumError

_RAISED: Final = re.compile(r"^(?:\w+: )*relatum\.errors\.(\w+): (.+)$", re.MULTILINE)
"""The last line of a Python traceback of one of our errors."""

_TRACEBACK: Final = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)$", re.MULTILINE)
"""Another error's traceback in Python; the last line says what it is."""

_LINE_MAX: Final = 500


def failure_of(error: Exception) -> RelatumError:
    """The error of Relatum that Spark's error carries; else one with the line that says most.

    A driver's line may be long, but holds no credentials: Spark redacts URLs of JDBC, and our errors name none.
    """
    raised = _RAISED.findall(str(error))
    kind = getattr(errors, raised[-1][0], None) if raised else None
    if isinstance(kind, type) and issubclass(kind, RelatumError):
        return kind(raised[-1][1])
    return RelatumError(f"Spark failed: {_line_of(error)}")


def _line_of(error: Exception) -> str:
    """The last line of a task's traceback in Python, else the first line of Spark's words."""
    java = getattr(error, "java_exception", None)
    text = str(java.toString()) if java is not None else str(error)
    if found := _TRACEBACK.findall(text):
        return str(found[-1])[:_LINE_MAX]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:_LINE_MAX] if lines else type(error).__name__
