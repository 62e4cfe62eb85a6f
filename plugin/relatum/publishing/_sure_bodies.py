"""Bodies whose keys are surely values that can be recorded: seen without parsing them. Pure."""

from typing import Final

from relatum.keys import KeyDefinition, KeyType
from relatum.limits import KEY_VALUE_BYTES_MAX

_BODY_BYTES_MAX: Final = 65_536
"""Bytes of a body that are looked at so: a larger one is parsed, or may be too large for that."""

_ESCAPED: Final = b"\\u"
"""How a body may hide a name, a NUL or half of a surrogate pair."""

_BACKSLASH: Final = 0x5C


def marks_of(definition: KeyDefinition) -> tuple[bytes, ...]:
    """The names of members, in their quotes, that all values of a key are members of.

    Empty where that is not so, and where a value of the key need not be a text, or a message has several.
    """
    places = definition.places
    if definition.value_type is not KeyType.TEXT or definition.is_composite or definition.is_many:
        return ()
    if not all(place.kind == "body" and place.mark and not place.is_trace for place in places):
        return ()
    # A path that ends with an item is marked by the member before.
    if not all(isinstance(place.path[-1], str) for place in places):
        return ()
    return tuple(place.mark for place in places)


def has_short_texts(body: bytes, marks: tuple[bytes, ...]) -> bool:
    """Whether each member of these names, wherever it lies in a body of JSON, is a text that is not too long.

    A body of which this is True may be no JSON; it is False where that is not seen at a glance.
    """
    if len(body) > _BODY_BYTES_MAX or _ESCAPED in body:
        return False
    for mark in marks:
        at = body.find(mark)
        while at >= 0:
            at += len(mark)
            value = body[at : at + 3]
            if value.startswith(b': "'):
                begin = at + 3
            elif value.startswith(b':"'):
                begin = at + 2
            else:
                return False
            end = body.find(b'"', begin)
            # What ends with a backslash may go on behind an escaped quote.
            if not begin <= end <= begin + KEY_VALUE_BYTES_MAX or body[end - 1] == _BACKSLASH:
                return False
            at = body.find(mark, end)
    return True
