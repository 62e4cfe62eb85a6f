"""Links to where the traces of messages are shown: by a pattern of the operator, and an id that a message carries."""

import re
from typing import Final
from urllib.parse import urlsplit

from relatum.checks import shown
from relatum.errors import ConfigurationError
from relatum.keys import bases_of, preset
from relatum.reading import Message
from relatum_consumer.web.masking import Masking

PLACE: Final = "{trace_id}"
"""What stands in the pattern for the id."""

_URL: Final = re.compile(r"[!#$%&()*+,\-./:;=?@\[\]_~0-9A-Za-z]+")
"""Characters of a URL: no space, no quote, and no other brace."""

_ID: Final = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}")
"""A trace's id, of 64 or 128 bits. What a header has in its place is anybody's, and no part of an address."""

(_TRACE,) = preset("traceparent")


def check_trace_url(pattern: str) -> None:
    """See that a pattern can be one.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        parts = urlsplit(pattern)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
    except ValueError:
        is_url = False
    rest = pattern.replace(PLACE, "")
    if not is_url or PLACE not in pattern or PLACE in parts.netloc or not _URL.fullmatch(rest):
        raise ConfigurationError(
            f"a trace's URL is as https://jaeger.example/trace/{PLACE}: http or https, and {PLACE} behind the host; "
            f"not {shown(pattern)}"
        )


def trace_href(pattern: str | None, masking: Masking, message: Message) -> str | None:
    """Where the trace of a message is shown; None where nobody said where, or the message carries no id to show."""
    if pattern is None or masking.is_masked(_TRACE):
        return None
    values, _ = _TRACE.read(bases_of(message))
    return pattern.replace(PLACE, values[0]) if values and _ID.fullmatch(values[0]) else None
