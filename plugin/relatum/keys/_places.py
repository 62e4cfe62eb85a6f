"""The places of a key's values in a message: headers, properties and JSON bodies, each whole or at a path. Pure.

Paths are a subset of JSONPath: `$.order.id`, `$['order id']`, `$.items[0].sku`, `$.items[*].sku`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from orjson import JSONDecodeError, loads

from relatum.common.checks import shown
from relatum.common.limits import KEY_NAME_BYTES_MAX
from relatum.errors import InvalidKeyDefinition
from relatum.keys._canonical import InvalidValue, SkipReason

PROPERTIES: Final = ("correlation_id", "message_id", "type", "app_id", "user_id", "reply_to")
"""The message properties that a key's values can come from, by the names of pika and aio-pika."""

PLACES_MAX: Final = 8
"""Maximum alternative places of one value."""

_KINDS: Final = ("header", "property", "body", "trace-id")
_OR: Final = re.compile(rf" or (?=(?:{'|'.join(_KINDS)}):)")
_PATH_PREFIXES: Final = ("$.", "$[")
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_-]+\Z", re.ASCII)
_TRACE: Final = re.compile(
    r"(?:[0-9a-f]{2}-(?P<w3c>[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
    r"|(?P<b3>[0-9a-f]{32}|[0-9a-f]{16})-[0-9a-f]{16}(?:-.*)?)\Z",
    re.DOTALL,
)

STEPS_MAX: Final = 16
"""Maximum steps of a path: the interceptor allows as many levels of headers."""

Step: TypeAlias = "str | int | None"
"""The name of an object's member, the index of an array's item, or None for every item."""

Path: TypeAlias = tuple[Step, ...]

_STEP: Final = re.compile(
    r"""\.(?P<plain>[^\s.\[\]'"*$()?@,:\\]+) | \[(?:(?P<index>0|[1-9][0-9]{0,8}) | (?P<each>\*)
    | '(?P<single>(?:[^'\\]|\\['\\])+)' | "(?P<double>(?:[^"\\]|\\["\\])+)")\]""",
    re.VERBOSE,
)
_PLAIN: Final = re.compile(r"""[^\s.\[\]'"*$()?@,:\\]+\Z""")

BODY_BYTES_MAX: Final = 262_144
"""Maximum bytes of a body that is parsed. Parsing takes up to seventy times as much memory, and a tenth of a second."""

_JSON: Final = frozenset({"application/json", "text/json"})
_PLAIN_TEXT: Final = frozenset({"", "utf-8", "utf8", "us-ascii", "ascii", "identity", "8bit", "7bit", "binary"})
"""Content encodings of uncompressed text. kombu writes the character set into this property."""

_UNPARSED: Final = object()

PACKED: Final = object()
"""A body of JSON that is compressed: it may have the value."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a message.

    Attributes:
        kind: `"header"`, `"property"` or `"body"`.
        name: The header's or property's name; empty for the body.
        path: The path inside the header or body; empty for the whole.
        is_trace: Whether the value is the trace id inside a text in the format of `traceparent` or `b3`.
        media_type: The content type of the bodies; empty for JSON of any content type.
        mark: Bytes that every body with this place contains, unless it escapes letters; empty if there are none.
    """

    kind: str
    name: str
    path: Path = ()
    is_trace: bool = False
    media_type: str = ""
    mark: bytes = field(init=False, default=b"", compare=False)

    def __post_init__(self) -> None:
        members = [step for step in self.path if isinstance(step, str)]
        if self.kind == "body" and members and _PLAIN_NAME.match(members[-1]):
            object.__setattr__(self, "mark", f'"{members[-1]}"'.encode())

    def __str__(self) -> str:
        if self.kind == "body":
            prefix = f"{'trace-id:' if self.is_trace else ''}body:{self.media_type}{':' if self.media_type else ''}"
            return prefix + path_text(self.path)
        if self.path or (self.kind == "header" and not self.is_trace and self.name.startswith(_PATH_PREFIXES)):
            return f"header:{path_text((self.name, *self.path))}"
        return f"{'trace-id' if self.is_trace else self.kind}:{self.name}"

    @property
    def is_plain(self) -> bool:
        """Whether the value is a whole header or property."""
        return not self.path and not self.is_trace

    def within(self, base: Any) -> list[Any]:
        """Return the raw values in a whole header, a property or the body's JSON; `InvalidValue` if it is `PACKED`."""
        if base is None:
            return []
        if base is PACKED:
            raise InvalidValue(SkipReason.NOT_JSON)
        values = walk(base, self.path) if self.path else [base]
        return [_trace_id(each) for each in values] if self.is_trace else values

    @classmethod
    def parse(cls, text: str, *, key: str) -> "Place":
        """Return the place that a text names; `key` is for the error."""
        kind, separator, name = text.partition(":")
        if not separator or kind not in _KINDS:
            kind, name = "header", text
        is_trace = kind == "trace-id"
        if kind == "body" or (is_trace and name.startswith("body:")):
            return cls._parse_body(name.removeprefix("body:") if is_trace else name, key=key, is_trace=is_trace)
        if kind == "property" and name not in PROPERTIES:
            raise invalid(key, f"unknown property {name!r}; properties are {', '.join(PROPERTIES)}")
        path: Path = ()
        if kind == "header" and separator and name.startswith(_PATH_PREFIXES):
            header, *steps = parse_path(name, key=key)
            if not isinstance(header, str):
                raise invalid(key, f"{shown(text)} must begin with the name of a header, as in header:$.a.b")
            name, path = header, tuple(steps)
        check_name(name, key=key)
        return cls("header" if is_trace else kind, name, path, is_trace)

    @classmethod
    def _parse_body(cls, text: str, *, key: str, is_trace: bool) -> "Place":
        media_type, dollar, path = text.partition("$")
        media_type = media_type.strip().lower()
        if not dollar or (media_type and (not media_type.endswith(":") or "/" not in media_type)):
            raise invalid(
                key,
                f"{shown('body:' + text)} is not a place in a body: write body:$.order.id, or "
                "body:application/cloudevents+json:$.id for bodies of one content type",
            )
        steps = parse_path(dollar + path, key=key)
        check_name(text, key=key)
        return cls("body", "", steps, is_trace, media_type.removesuffix(":"))


@dataclass(frozen=True, slots=True)
class Component:
    """A component of a key's value: the value of the first of its places, in order, that has one."""

    places: tuple[Place, ...]

    def __str__(self) -> str:
        return " or ".join(map(str, self.places))

    @property
    def lone(self) -> Place | None:
        """The component's only place, if that is a whole header or property; else None."""
        return self.places[0] if len(self.places) == 1 and self.places[0].is_plain else None

    @property
    def label(self) -> str:
        """A short name: the header's or property's name, or the component's whole source."""
        place = self.lone
        return str(self) if place is None else place.name

    @property
    def is_many(self) -> bool:
        """Whether a message may have several values."""
        return any(None in place.path for place in self.places)

    def read(self, base_of: Callable[[Place], Any]) -> list[Any]:
        """Return the component's raw values in a message, without None; see `KeyDefinition.read`."""
        packed = None
        for place in self.places:
            base = base_of(place)
            if base is PACKED:
                packed = place
            elif values := place.within(base):
                return values
        return packed.within(PACKED) if packed else []

    @classmethod
    def parse(cls, text: str, *, key: str) -> "Component":
        """Parse places such as `header:NAME` or `body:PATH`, or the bare NAME of a header, joined by ` or `."""
        texts = _OR.split(text)
        if len(texts) > PLACES_MAX:
            raise invalid(key, f"its source has more than {PLACES_MAX} places: leave some out")
        return cls(tuple(Place.parse(each, key=key) for each in texts))


def _trace_id(value: Any) -> str:
    text = value.decode("latin-1") if isinstance(value, bytes | bytearray) else value
    match = _TRACE.match(text) if isinstance(text, str) else None
    trace_id = match and (match["w3c"] or match["b3"])
    # In both formats, an id of zeros means that there is none.
    if not trace_id or not trace_id.strip("0"):
        raise InvalidValue(SkipReason.NOT_TRACE_ID)
    return trace_id


def invalid(key: str, reason: str) -> InvalidKeyDefinition:
    """Return the error for an invalid definition of a key."""
    return InvalidKeyDefinition(f"key {key!r}: {reason}", key=key)


def check_name(name: Any, *, key: Any) -> None:
    """Raise `InvalidKeyDefinition` for an invalid name of a key or of its source."""
    if not isinstance(name, str):
        raise InvalidKeyDefinition(f"a key's name must be text, not {type(name).__name__}", key=str(key))
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        reason = f"key {shown(key)}: its name or its source's name contains a lone surrogate; use Unicode text"
        raise InvalidKeyDefinition(reason, key=repr(key)) from None
    if not 1 <= size <= KEY_NAME_BYTES_MAX or "\0" in name:
        reason = f"key {shown(key)}: names of keys and sources must have 1 to {KEY_NAME_BYTES_MAX} bytes and no NUL"
        raise InvalidKeyDefinition(reason, key=str(key))


def parse_path(text: str, *, key: str) -> Path:
    steps: list[Step] = []
    position = 1 if text.startswith("$") else 0
    while position and position < len(text):
        match = _STEP.match(text, position)
        if match is None:
            break
        steps.append(_step(match))
        position = match.end()
    if not steps or position < len(text):
        raise invalid(
            key,
            f"{shown(text)} is not a path: write members and indexes as $.order.id, $['order id'], $.items[0].sku, "
            "and $.items[*].sku for each item of an array",
        )
    if len(steps) > STEPS_MAX:
        raise invalid(key, f"its path has more than {STEPS_MAX} steps: choose a value that is nested less deeply")
    return tuple(steps)


def _step(match: "re.Match[str]") -> Step:
    if match["index"] is not None:
        return int(match["index"])
    if match["each"] is not None:
        return None
    quoted = match["single"] or match["double"]
    return match["plain"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)


def path_text(path: Path) -> str:
    """Return the canonical text of a path."""
    return "$" + "".join(map(_step_text, path))


def _step_text(step: Step) -> str:
    if isinstance(step, str):
        if _PLAIN.match(step):
            return f".{step}"
        escaped = step.replace("\\", "\\\\").replace("'", "\\'")
        return f"['{escaped}']"
    return "[*]" if step is None else f"[{step}]"


def walk(value: Any, path: Path) -> list[Any]:
    """Return the values at a path, in order and without null; [] if there are none."""
    for position, step in enumerate(path):
        if step is None:
            rest = path[position + 1 :]
            return [found for item in value for found in walk(item, rest)] if isinstance(value, list) else []
        if isinstance(step, str):
            value = value.get(step) if isinstance(value, dict) else None
        else:
            value = value[step] if isinstance(value, list) and step < len(value) else None
        if value is None:
            return []
    return [] if value is None else [value]


def is_compressed(content_encoding: Any) -> bool:
    """Whether bodies with this content encoding are compressed, so that no key is read from them."""
    return str(content_encoding or "").lower() not in _PLAIN_TEXT


class Content:
    """A message's body, parsed at most once, when it is first needed. The argument `body` returns the bytes."""

    __slots__ = ("_body", "_is_packed", "_parsed", "_read_body", "_type")

    def __init__(self, content_type: Any, content_encoding: Any, body: Callable[[], bytes]) -> None:
        self._type = content_type.partition(";")[0].strip().lower() if isinstance(content_type, str) else ""
        self._is_packed = is_compressed(content_encoding)
        self._read_body = body
        self._body: bytes | None = None
        self._parsed: Any = _UNPARSED

    def document(self, media_type: str, mark: bytes) -> Any:
        """Return the body's JSON; None if the body is not JSON, or cannot have the value; `PACKED` if it is compressed.

        A body is JSON if its content type says so, or if it has no content type and begins like an object or array;
        other text without a content type is not an error. `media_type` and `mark` are those of a `Place`. Raises
        `InvalidValue` if the body is too large, or is not JSON although its content type is.
        """
        kind = self._type
        if media_type:
            if kind != media_type:
                return None
        elif kind and kind not in _JSON and not kind.endswith("+json"):
            return None
        if self._is_packed:
            return PACKED if kind else None
        if self._body is None:
            self._body = self._read_body()
        body = self._body
        if mark not in body and b"\\u" not in body:
            return None
        if not kind and not body.lstrip()[:1].startswith((b"{", b"[")):
            return None
        if self._parsed is _UNPARSED:
            self._parsed = self._parse(body)
        if isinstance(self._parsed, SkipReason):
            raise InvalidValue(self._parsed)
        return self._parsed

    def _parse(self, body: bytes) -> Any:
        """Return the body's JSON, None if there is none, or the reason why the body is refused."""
        if len(body) > BODY_BYTES_MAX:
            return SkipReason.BODY_TOO_LARGE
        try:
            return loads(body)
        except JSONDecodeError:
            return SkipReason.NOT_JSON if self._type else None
