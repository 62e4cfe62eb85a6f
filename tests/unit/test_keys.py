"""Key definitions and the canonical form of their values."""

import pickle
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum import errors
from relatum.keys import (
    InvalidValue,
    KeyDefinition,
    KeyType,
    SkipReason,
    as_definitions,
    bases,
    canonical,
    join_components,
    microseconds,
    moment,
    timestamp_us,
)
from relatum.limits import INTEGER_MAX, INTEGER_MIN, KEY_VALUE_BYTES_MAX, TIME_US_MAX, TIME_US_MIN
from relatum.publishing import Stamper

TEXT, INTEGER, TIMESTAMP = KeyType.TEXT, KeyType.INTEGER, KeyType.TIMESTAMP


@pytest.mark.parametrize(
    ("value", "key_type", "expected"),
    [
        ("o-17", TEXT, "o-17"),
        (" Ö ", TEXT, " Ö "),
        ("", TEXT, ""),
        (42, TEXT, "42"),
        ("42", TEXT, "42"),
        (True, TEXT, "true"),
        (False, TEXT, "false"),
        (b"abc", TEXT, "abc"),
        ("x" * KEY_VALUE_BYTES_MAX, TEXT, "x" * KEY_VALUE_BYTES_MAX),
        (42, INTEGER, "42"),
        ("042", INTEGER, "42"),
        ("-7", INTEGER, "-7"),
        (b"42", INTEGER, "42"),
        (INTEGER_MAX, INTEGER, "9223372036854775807"),
        (INTEGER_MIN, INTEGER, "-9223372036854775808"),
        (datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), TIMESTAMP, "1000000"),
        (datetime(1970, 1, 1, 0, 0, 1), TIMESTAMP, "1000000"),
        (datetime(1970, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))), TIMESTAMP, "0"),
        ("1970-01-01T00:00:00.000001Z", TIMESTAMP, "1"),
        (1_000_001, TIMESTAMP, "1000001"),
        (TIME_US_MAX, TIMESTAMP, str(TIME_US_MAX)),
    ],
)
def test_equal_values_have_one_canonical_form(value: Any, key_type: KeyType, expected: str) -> None:
    """What the documentation calls one value is one text."""
    assert canonical(value, key_type) == expected


@pytest.mark.parametrize(
    ("value", "key_type", "reason"),
    [
        (1.5, TEXT, SkipReason.FLOAT),
        (Decimal(1), TEXT, SkipReason.DECIMAL),
        ({"a": 1}, TEXT, SkipReason.NESTED),
        ([1], TEXT, SkipReason.NESTED),
        ("a\0b", TEXT, SkipReason.NUL),
        ("\ud800", TEXT, SkipReason.NOT_UNICODE),
        (b"\xff", TEXT, SkipReason.NOT_UNICODE),
        ("x" * (KEY_VALUE_BYTES_MAX + 1), TEXT, SkipReason.TOO_LONG),
        ("ö" * (KEY_VALUE_BYTES_MAX // 2 + 1), TEXT, SkipReason.TOO_LONG),
        (datetime(2020, 1, 1, tzinfo=UTC), TEXT, SkipReason.UNSUPPORTED),
        (object(), TEXT, SkipReason.UNSUPPORTED),
        (INTEGER_MAX + 1, TEXT, SkipReason.OUT_OF_RANGE),
        (True, INTEGER, SkipReason.NOT_INTEGER),
        ("4 2", INTEGER, SkipReason.NOT_INTEGER),
        ("٤", INTEGER, SkipReason.NOT_INTEGER),
        (INTEGER_MAX + 1, INTEGER, SkipReason.OUT_OF_RANGE),
        (INTEGER_MIN - 1, INTEGER, SkipReason.OUT_OF_RANGE),
        (1.0, INTEGER, SkipReason.FLOAT),
        (TIME_US_MAX + 1, TIMESTAMP, SkipReason.OUT_OF_RANGE),
        (TIME_US_MIN - 1, TIMESTAMP, SkipReason.OUT_OF_RANGE),
        ("2020-01-01T00:00:00", TIMESTAMP, SkipReason.NOT_TIMESTAMP),
        ("yesterday", TIMESTAMP, SkipReason.NOT_TIMESTAMP),
        (True, TIMESTAMP, SkipReason.NOT_TIMESTAMP),
    ],
)
def test_values_that_cannot_be_keys_are_refused_for_a_named_reason(
    value: Any, key_type: KeyType, reason: SkipReason
) -> None:
    """Each kind of bad value has its own reason; a publisher is told key and reason before anything is sent."""
    with pytest.raises(InvalidValue) as caught:
        canonical(value, key_type)
    assert caught.value.reason is reason
    stamper = Stamper(as_definitions([KeyDefinition("order_id", type=key_type)]))
    with pytest.raises(errors.InvalidRelationshipKey) as refused:
        stamper.stamp({"order_id": value}, "m", 1, None, b"")
    assert (refused.value.key, refused.value.reason) == ("order_id", reason)
    stamper.stamp({"other": value}, "m", 1, None, b"")


@given(st.text())
def test_text_is_compared_code_point_for_code_point(text: str) -> None:
    """A text's canonical form is the text, or a refusal; never another text."""
    encoded = text.encode("utf-8", "surrogatepass")
    if "\0" in text or len(encoded) > KEY_VALUE_BYTES_MAX or any("\ud800" <= char <= "\udfff" for char in text):
        with pytest.raises(InvalidValue):
            canonical(text, TEXT)
    else:
        assert canonical(text, TEXT) == text


@given(st.datetimes(timezones=st.just(UTC)))
def test_moments_survive_to_the_microsecond(when: datetime) -> None:
    """A timestamp's canonical form gives the moment back."""
    assert moment(int(canonical(when, TIMESTAMP))) == when
    assert timestamp_us(when) == microseconds(when)


@given(st.lists(st.text(st.sampled_from("ab|\\"), max_size=4), min_size=2, max_size=3), st.data())
def test_composites_are_equal_only_where_their_components_are(parts: list[str], data: st.DataObject) -> None:
    """Escaping keeps ("a|", "b") and ("a", "|b") apart."""
    others = data.draw(
        st.lists(st.text(st.sampled_from("ab|\\"), max_size=4), min_size=len(parts), max_size=len(parts))
    )
    assert (join_components(parts) == join_components(others)) == (parts == others)


def test_a_definition_takes_headers_properties_and_composites() -> None:
    """A value is found wherever the definition says, and only where every component is there."""
    key = KeyDefinition("k", source=["header:host", "property:correlation_id"])
    properties = {"correlation_id": "c|1"}
    assert key.read(bases({"host": "h"}, properties.get, bytes)) == (["h|c\\|1"], [])
    assert key.read(bases({}, properties.get, bytes)) == ([], [])
    assert key.canonical_query(("h", "c|1")) == "h|c\\|1"


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeyDefinition("x" * 256),
        lambda: KeyDefinition("k", source="property:timestamp"),
        lambda: as_definitions([KeyDefinition("k"), KeyDefinition("k", type="integer")]),
        lambda: KeyDefinition("k", source=["a", "b"]).canonical_query("a"),
        lambda: as_definitions([KeyDefinition("k"), KeyDefinition("k", names="id")]),
    ],
)
def test_definitions_that_cannot_be_are_refused(make: Any) -> None:
    """A bad definition is one clear error that names the key."""
    with pytest.raises(errors.InvalidKeyDefinition) as caught:
        make()
    assert caught.value.key is not None


def test_errors_keep_their_fields_through_pickle() -> None:
    """Spark and process pools move errors between processes."""
    error = errors.OffsetExpired("gone", stream="s", offset=3, first=7)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.args, copy.stream, copy.offset, copy.first) == (type(error), error.args, "s", 3, 7)


@pytest.mark.parametrize(
    ("definition", "code", "hint"),
    [
        (KeyDefinition("order_id"), "KeyDefinition('order_id', source='header:order_id')", False),
        (KeyDefinition("message_id"), "KeyDefinition('message_id', source='header:message_id')", True),
        (KeyDefinition("id", source="type"), "KeyDefinition('id', source='header:type')", True),
        (KeyDefinition("id", source="header:type"), "KeyDefinition('id', source='header:type')", False),
        (KeyDefinition("type", source="property:type"), "KeyDefinition('type', source='property:type')", False),
        (
            KeyDefinition("n", source=("a", "property:type"), type="integer"),
            "KeyDefinition('n', source=('header:a', 'property:type'), type='integer')",
            False,
        ),
        (KeyDefinition("id", source="propety:type"), "KeyDefinition('id', source='header:propety:type')", True),
        (KeyDefinition("type", source=len), "KeyDefinition('type', source='header:type')", False),
        (
            KeyDefinition("cause", source="cause_id", names="id"),
            "KeyDefinition('cause', source='header:cause_id', names='id')",
            False,
        ),
    ],
)
def test_a_definition_is_written_as_code_and_hints_at_properties(
    definition: KeyDefinition, code: str, hint: bool
) -> None:
    """The code means the same; a hint comes where a bare name became a header's and a property has it."""
    assert definition.code == code
    same = eval(code, {"KeyDefinition": KeyDefinition})
    assert (same.sources, same.names) == (definition.sources, definition.names)
    assert bool(definition.hint) is hint
    assert not hint or f"--source property:{definition.places[0].name.rpartition(':')[2]}" in definition.hint
