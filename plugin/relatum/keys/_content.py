"""A message's body as JSON: what is taken for JSON, and what is not even looked at. Pure."""

from collections.abc import Callable
from typing import Any, Final

from orjson import JSONDecodeError, loads

from relatum.keys._canonical import InvalidValue, SkipReason

BODY_BYTES_MAX: Final = 262_144
"""Bytes of a body that are read: a parsed one takes up to seventy times that in memory, and a tenth of a second."""

_JSON: Final = frozenset({"application/json", "text/json"})
_PLAIN: Final = frozenset({"", "utf-8", "utf8", "us-ascii", "ascii", "identity", "8bit", "7bit", "binary"})
"""Content encodings of bodies that are the text itself; kombu writes those of its text there."""

_OPENINGS: Final = (b"{", b"[")


class Content:
    """One message's body, which is parsed when it is first asked for, and once at most.

    Args:
        content_type: The property of that name, if any.
        content_encoding: The property of that name, if any.
        body: Gives the body.
    """

    __slots__ = ("_body", "_document", "_encoding", "_is_parsed", "_refused", "_take", "_type")

    def __init__(self, content_type: Any, content_encoding: Any, body: Callable[[], bytes]) -> None:
        self._type = content_type.partition(";")[0].strip().lower() if isinstance(content_type, str) else ""
        self._encoding = content_encoding
        self._take = body
        self._body: bytes | None = None
        self._is_parsed = False
        self._document: Any = None
        self._refused: SkipReason | None = None

    def document(self, media_type: str, mark: bytes) -> Any:
        """The body's JSON; None where it has none, or cannot have what is sought.

        A body is JSON where its content type says so, or where there is none and it begins as an object or array. A
        body that was not said to be JSON, and is none, is no error.

        Args:
            media_type: The only content type that is meant; empty for any of JSON.
            mark: Bytes without which the body does not have what is sought, unless it escapes letters.

        Raises:
            InvalidValue: the body was said to be JSON, and is none; or it is too large to be read.
        """
        kind = self._type
        if media_type:
            if kind != media_type:
                return None
        elif kind and kind not in _JSON and not kind.endswith("+json"):
            return None
        if self._is_parsed:
            return self._document
        body = self._body
        if body is None:
            body = self._body = self._take()
        if mark not in body and b"\\u" not in body:
            return None
        if not kind and not body.lstrip()[:1].startswith(_OPENINGS):
            return None
        self._parse(body, is_said=bool(kind))
        if self._refused is not None:
            raise InvalidValue(self._refused)
        return self._document

    def _parse(self, body: bytes, *, is_said: bool) -> None:
        encoding = self._encoding
        if self._refused is not None:
            return
        if encoding and str(encoding).lower() not in _PLAIN:
            self._refused = SkipReason.NOT_JSON
        elif len(body) > BODY_BYTES_MAX:
            self._refused = SkipReason.BODY_TOO_LARGE
        else:
            try:
                self._document = loads(body)
            except JSONDecodeError:
                if is_said:
                    self._refused = SkipReason.NOT_JSON
                    return
            self._is_parsed = True
