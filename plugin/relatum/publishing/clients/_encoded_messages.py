"""Messages that a client has encoded in AMQP 1.0 already: stamped in their bytes, whatever object they came from.

What is in them is read as every reader of the stream reads it, so a key's value is the one that is recorded.
"""

from datetime import datetime
from typing import Any, Final, NamedTuple

from relatum.errors import InvalidInput, UndecodableMessage
from relatum.publishing._interception import Interception
from relatum.publishing._locate import Sent
from relatum.publishing._stamp import Stamp, Stamper
from relatum.publishing.clients._publish import receipt_header
from relatum.reading import Message, Properties
from relatum.wire import amqp10, id_section, with_added

_new_tuple: Final = tuple.__new__
_NO_PROPERTIES: Final = Properties()
_NO_ID: Final = 0x40
"""The constructor of a null."""

_PLAIN: Final = frozenset({str, int, bool})
_TEXT: Final = frozenset({str})


class Ready(NamedTuple):
    """A message as it is sent.

    Attributes:
        raw: Its bytes.
        stamp: What was added; None where it has no place for it, and goes as it is.
        body: Its body.
    """

    raw: bytes
    stamp: Stamp | None
    body: bytes

    def sent(self, exchange: str, routing_key: str, began_s: float | None = None) -> Sent | None:
        """What is known of it for settling; None where nothing tells it from others."""
        if self.stamp is None:
            return None
        stamp = self.stamp
        return Sent.of(exchange, routing_key, stamp.message_id, stamp.headers, self.body, monotonic_s=began_s)


def ready(
    interception: Interception,
    raw: bytes,
    *,
    is_message: bool = True,
    asks: bool = False,
) -> Ready:
    """The message to send for one that was given.

    - `is_message`: Whether nothing at all is a message, too: rstream encodes one of an empty body so.
    - `asks`: Whether the recorder is to give a receipt for it.

    Raises:
        InvalidRelationshipKey, InvalidGroup, HeadersRefused, KeyDefinitionConflict: as `Stamper.stamp` does.
        InvalidInput: it is no AMQP 1.0 message, and a value that cannot be recorded is an error.
    """
    stamper = interception.stamper(0, keeps_tables=True)
    try:
        return _ready(stamper, raw, [] if is_message and not raw else amqp10.find_sections(raw), asks)
    except UndecodableMessage as error:
        if not asks and stamper.takes_what_is_no_message():
            return Ready(raw, None, raw)
        raise InvalidInput(
            "bytes that are no AMQP 1.0 message have no place for an id, a time or a key, and nobody could relate "
            "them: publish rstream.AMQPMessage(body=…), or intercept(…, on_invalid='skip') to send them as they are; "
            "nothing was sent"
        ) from error


def are_plain(headers: dict[Any, Any]) -> bool:
    """Whether readers surely see these headers as they are: texts, integers and flags, and none they take away."""
    if not (_PLAIN.issuperset(map(type, headers.values())) and _TEXT.issuperset(map(type, headers))):
        return False
    # Readers take some of these for the broker's.
    return ",x-" not in "," + ",".join(headers)


def plainly_ready(
    interception: Interception, raw: bytes, headers: dict[str, Any], body: bytes, *, begin: int = 0, end: int = 0
) -> Ready:
    """As `ready`, of a message that is nothing but these headers, as a reader will see them, and a body.

    It need not be decoded, nor its sections be found, which is most of what stamping costs.

    - `begin`, `end`: Where its section of properties belongs in the bytes, or an empty one lies.
    """
    stamp = interception.stamper(0, keeps_tables=True).stamp(headers or None, None, None, _NO_PROPERTIES, body)
    if stamp.added:
        return Ready(with_added(raw, amqp10.find_sections(raw), stamp.message_id, _added(stamp)), stamp, body)
    return _new_tuple(Ready, (raw[:begin] + id_section(stamp.message_id) + raw[end:], stamp, body))


def _added(stamp: Stamp) -> dict[str, Any]:
    sent = stamp.headers or {}
    return {name: sent[name] for name in stamp.added}


def _ready(stamper: Stamper, raw: bytes, sections: list[amqp10.Section], asks: bool) -> Ready:
    message = Message.from_record("", 0, raw)
    headers: dict[str, Any] = dict(message.headers)
    properties, body = message.properties, message.body
    if any(type(value) is datetime for value in headers.values()):
        headers |= _exact_moments(raw, sections, headers)
    message_id = properties.message_id
    if message_id is None and _has_id(raw, sections):
        # One that is no text is the caller's all the same.
        message_id = ""
    receipt = receipt_header(message_id) if asks else None
    stamp = stamper.stamp(headers or None, message_id, properties.timestamp, properties, body, receipt)
    message_id = stamp.message_id if stamp.names_message else None
    return Ready(with_added(raw, sections, message_id, _added(stamp)), stamp, body)


def _has_id(raw: bytes, sections: list[amqp10.Section]) -> bool:
    for code, start, _ in reversed(sections):
        if code == amqp10.PROPERTIES:
            count, at, _ = amqp10.entries_of(raw, start, "list")
            return bool(count) and raw[at] != _NO_ID
    return False


def _exact_moments(raw: bytes, sections: list[amqp10.Section], headers: dict[str, Any]) -> dict[str, datetime]:
    """Headers that are moments, with what of a second readers leave out: a key's value is refused for it."""
    found: dict[str, datetime] = {}
    for code, start, _ in sections:
        if code in (amqp10.APPLICATION_PROPERTIES, amqp10.MESSAGE_ANNOTATIONS):
            decoded = amqp10.decode_map(raw, start)
            found |= {name: value for name, value in decoded.items() if name in headers and type(value) is datetime}
    return found
