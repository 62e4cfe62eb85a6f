"""Problems: errors for people and scripts, with an HTTP status, a code, what failed, and what to do next."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from relatum import errors
from relatum.membership import GROUP_KEY

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Problem(Exception):
    """The reason why there is no answer: `code` is its name for scripts, `hint` says what to do next."""

    status: int
    code: str
    message: str
    hint: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """What failed, and what to do."""
        return f"{self.message.rstrip('.')}. {self.hint}"


NARROW_HINT: Final = "Ask for less: a shorter span of time, fewer streams, one key, a lower limit."
"""The hint for a request that took too long."""

# The first matching class counts, so subclasses come first.
_KINDS: Final[tuple[tuple[type[errors.RelatumError], int, str], ...]] = (
    (errors.InvalidInput, 400, "Change the query."),
    (errors.NothingRecorded, 404, "Run a recorder on the streams: relatum record STREAM."),
    (errors.SchemaMissing, 503, "Run: relatum migrate."),
    (errors.ConfigurationError, 503, "Change the configuration of the page or the recorder."),
    (errors.OffsetExpired, 410, "Retention has dropped the message; later ones are still there."),
    (errors.StreamNotFound, 404, "Look for the name in the list of streams."),
    (errors.OffsetNotFound, 404, "Offsets have gaps: open the stream, and start from its first or last message."),
    (errors.KeyNotDefined, 404, "The page of streams lists the defined keys."),
    (errors.NotFound, 404, "Look for the name in the list."),
    (errors.AccessRefused, 403, "The page's user may not read this; the administrator can allow it."),
    (errors.StreamReplaced, 409, "Run a recorder on the stream: relatum record STREAM."),
    (errors.Conflict, 409, "Check the stream: relatum verify STREAM."),
    (errors.Transient, 503, "Nothing is lost: try again in a moment."),
    (errors.DataError, 502, "The data cannot be repaired: recorders and readers continue after it."),
)

GROUP_KEY_HINT: Final = (
    f"`relatum keys add {GROUP_KEY.name} "
    + " ".join(f"--source {each}" for each in GROUP_KEY.sources)
    + "` defines it. Older messages are found after a backfill."
)


def problem_of(error: Exception) -> Problem:
    """Return the problem that describes an error to users. Unexpected errors are logged with their tracebacks."""
    if isinstance(error, Problem):
        return error
    unknown = 500, "The log has the traceback: please tell the administrator."
    status, hint = next(((status, hint) for kind, status, hint in _KINDS if isinstance(error, kind)), unknown)
    if status in (500, 502):
        log.exception("a page failed", exc_info=error)
    if not isinstance(error, errors.RelatumError):
        return Problem(status, "unexpected", "the page failed unexpectedly", hint)
    headers = {"Retry-After": "1"} if isinstance(error, errors.Transient) else {}
    code = re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()
    return Problem(status, code, str(error), hint, headers)
