"""Errors as Spark hands them on, made Relatum's again.

What a task or a data source raises reaches the driver as text within an error of Spark's own.
"""

import re
from typing import Final

from relatum import errors
from relatum.errors import RelatumError

_RAISED: Final = re.compile(r"^(?:\w+: )*relatum\.errors\.(\w+): (.+)$", re.MULTILINE)
"""The last line of a Python traceback of one of our errors."""

_LINE_MAX: Final = 500


def failure_of(error: Exception) -> RelatumError:
    """The error of Relatum that Spark's error carries; else one with the first line of what Spark says.

    A driver's line may be long, but holds no credentials: Spark redacts URLs of JDBC, and our errors name none.
    """
    raised = _RAISED.findall(str(error))
    kind = getattr(errors, raised[-1][0], None) if raised else None
    if isinstance(kind, type) and issubclass(kind, RelatumError):
        return kind(raised[-1][1])
    return RelatumError(f"Spark failed: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    java = getattr(error, "java_exception", None)
    text = str(java.toString()) if java is not None else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:_LINE_MAX] if lines else type(error).__name__
