"""Where a message's sections before the body lie: what a recorder asks of every message. See `_amqp10`."""

from typing import NamedTuple

from relatum.errors import UndecodableMessage
from relatum.wire._amqp10 import (
    APPLICATION_PROPERTIES,
    FOOTER,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    SECTIONS_MAX,
    WIDTHS,
    Section,
    end_of_value,
    find_sections,
)


class Head(NamedTuple):
    """Where the sections before the body have their values; -1 for one that is not there."""

    annotations: int
    properties: int
    application: int


def find_head(raw: bytes) -> tuple[int, int, int]:
    """`find_sections` for the recorder's path: the places of what it reads, no object for each section.

    Returns:
        What a `Head` holds, as a plain tuple: it is made for every message.

    Raises:
        UndecodableMessage: the bytes are not AMQP 1.0 sections, in just the cases in which `find_sections` says so.
    """
    annotations = properties = application = -1
    position, size = 0, len(raw)
    widths = WIDTHS
    try:
        for _ in range(SECTIONS_MAX):
            if position >= size:
                break
            if raw[position] != 0 or raw[position + 1] != 0x53:
                return _head_of(find_sections(raw))
            section, start = raw[position + 2], position + 3
            if section == APPLICATION_PROPERTIES:
                application = start
            elif section == PROPERTIES:
                properties = start
            elif section == MESSAGE_ANNOTATIONS:
                annotations = start
            elif not HEADER <= section <= FOOTER:
                return _head_of(find_sections(raw))
            position = start + 2 + raw[start + 1] if widths[raw[start]] == -1 else end_of_value(raw, start)
    except IndexError:
        raise UndecodableMessage("an AMQP 1.0 section ends too early") from None
    if position != size or not size:
        raise UndecodableMessage("an AMQP 1.0 section ends too early, or there are too many")
    return annotations, properties, application


def _head_of(sections: list[Section]) -> Head:
    """The same from sections: for descriptors in their longer forms."""
    starts = {code: start for code, start, _ in sections}
    return Head(*(starts.get(code, -1) for code in (MESSAGE_ANNOTATIONS, PROPERTIES, APPLICATION_PROPERTIES)))
