"""What the interceptor adds, what it refuses, and that it changes nothing it was given."""

import copy
import logging
import time
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.errors import HeadersRefused, InvalidRelationshipKey
from relatum.keys import KeyDefinition, as_definitions
from relatum.limits import (
    HEADERS_BYTES_MAX,
    HEADERS_DEPTH_MAX,
    HEADERS_MAX,
    KEY_VALUE_BYTES_MAX,
    TIME_US_MAX,
    TIME_US_MIN,
)
from relatum.publishing import Stamper
from relatum.uuid7 import time_us_of, uuid7


def stamp(stamper: Stamper, headers: dict[str, Any] | None = None, body: Any = b"", **properties: Any) -> Any:
    """Stamp a message of these headers and properties."""
    given = SimpleNamespace(**properties)
    message_id, timestamp, ask = (properties.get(name) for name in ("message_id", "timestamp", "ask"))
    return stamper.stamp(headers, message_id, timestamp, given, body, ask)


def stamper(*keys: str | KeyDefinition, **options: Any) -> Stamper:
    """A stamper for these keys."""
    return Stamper(as_definitions(keys), **options)


def nested(levels: int) -> dict[str, Any]:
    """Headers with that many tables within each other."""
    value: Any = 1
    for _ in range(levels):
        value = {"in": value}
    return {"outer": value}


def test_a_bare_message_gets_an_id_and_a_time() -> None:
    """The id says the time; headers stay as they are, be there none."""
    before_us = time.time_ns() // 1000
    got = stamp(stamper())
    assert before_us - 2 <= time_us_of(got.message_id) <= time.time_ns() // 1000
    assert (got.headers, got.added) == (None, ())
    assert stamp(stamper(), {}).headers == {}
    assert stamp(stamper(), {"a": 1}).headers == {"a": 1}


def test_a_message_with_an_id_gets_a_time() -> None:
    """Whoever made the id: the caller may have taken it from another message."""
    for message_id in ("mine", uuid7(1)):
        got = stamp(stamper(), message_id=message_id)
        assert (got.message_id, got.added) == (message_id, ("relatum_time",))
        assert abs(got.headers["relatum_time"] - time.time() * 1e6) < 60e6


def test_a_message_that_is_stamped_twice_is_stamped_once() -> None:
    """As those with a receipt are: what the first stamp gave is not changed by the second."""
    first = stamp(stamper(), {"a": "b"}, ask=True)
    second = stamp(stamper(), first.headers, message_id=first.message_id)
    assert (second.headers, second.message_id, second.added) == (first.headers, first.message_id, ())


def test_message_ids_are_uuid7_and_differ() -> None:
    """Each generated id is a version 7 UUID of its own."""
    ids = {stamp(stamper()).message_id for _ in range(1000)}
    assert len(ids) == 1000
    assert all(text[14] == "7" and text[19] in "89ab" for text in ids)


def test_nothing_is_added_that_is_there() -> None:
    """The caller's own id and time stay, in either form."""
    got = stamp(stamper(), {"relatum_time": 5}, message_id="mine")
    assert (got.message_id, got.headers, got.added) == ("mine", {"relatum_time": 5}, ())
    for timestamp in (1_700_000_000, datetime(2024, 1, 1, tzinfo=UTC)):
        assert stamp(stamper(), {}, timestamp=timestamp, message_id="mine").headers == {}


def test_a_receipt_is_asked_for_by_a_header() -> None:
    """The header that asks the recorder is only there when it is asked."""
    assert stamp(stamper(), ask=True).headers["relatum_receipt"] is True
    assert stamp(stamper(), ask="name").added == ("relatum_time", "relatum_receipt")


def test_the_callers_headers_are_not_changed() -> None:
    """Headers given are copied, whatever comes of them."""
    headers = {"order_id": "1", "table": {"a": [1, 2]}}
    before = copy.deepcopy(headers)
    got = stamp(stamper("order_id", KeyDefinition("size", len)), headers, b"abc")
    assert headers == before
    assert got.headers["size"] == "3"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"a": 1}, "nested"),
        ([1], "nested"),
        (Decimal("1.5"), "decimal"),
        (1.5, "float"),
        ("a\0b", "nul_character"),
        ("x" * (KEY_VALUE_BYTES_MAX + 1), "too_long"),
        ("ü" * (KEY_VALUE_BYTES_MAX // 2 + 1), "too_long"),
        ("\ud800", "not_unicode"),
        (b"\xff", "not_unicode"),
        (2**63, "out_of_range"),
        (object(), "unsupported_type"),
    ],
)
def test_a_bad_value_is_refused_with_key_and_reason(value: Any, reason: str) -> None:
    """A value that cannot be recorded is an error that names key and reason."""
    with pytest.raises(InvalidRelationshipKey) as caught:
        stamp(stamper("order_id"), {"order_id": value})
    assert (caught.value.key, caught.value.reason) == ("order_id", reason)


@pytest.mark.parametrize(
    "value", ["", "x" * KEY_VALUE_BYTES_MAX, "ü" * (KEY_VALUE_BYTES_MAX // 2), 2**63 - 1, -(2**63), True, b"ok", None]
)
def test_a_good_value_is_sent_as_it_is(value: Any) -> None:
    """Values up to the limits pass, in the type the caller gave them."""
    assert stamp(stamper("order_id"), {"order_id": value}).headers["order_id"] is value


def test_a_value_that_is_no_key_is_the_clients_business() -> None:
    """Types that only a key cannot have are not refused in other headers."""
    stamp(stamper("order_id"), {"other": 1.5, "price": Decimal("1.5"), "list": [1]})


def test_skip_publishes_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    """With on_invalid="skip" headers stay as they are, values are counted by reason, and logged once."""
    tolerant = stamper("order_id", on_invalid="skip")
    with caplog.at_level(logging.WARNING, "relatum.interception"):
        for _ in range(3):
            assert stamp(tolerant, {"order_id": 1.5}).headers["order_id"] == 1.5
    assert tolerant.skipped == {("order_id", "float"): 3}
    assert len(caplog.records) == 1
    assert "1.5" not in caplog.text


def test_keys_from_properties_are_checked() -> None:
    """A key that comes from a property is checked there, in a composite too."""
    route = KeyDefinition("route", ("header:host", "property:type"))
    stamp(stamper(route), {"host": "a"}, type="b")
    with pytest.raises(InvalidRelationshipKey, match="route"):
        stamp(stamper(route), {"host": "a"}, type="b\0")


@pytest.mark.parametrize(
    ("key_type", "returned", "header"),
    [
        ("text", "o-1", "o-1"),
        ("text", 42, "42"),
        ("integer", "042", 42),
        ("timestamp", datetime(2024, 1, 1, 0, 0, 0, 123456, tzinfo=UTC), 1_704_067_200_123_456),
    ],
)
def test_a_key_of_the_body_is_lifted_into_its_header(key_type: str, returned: Any, header: Any) -> None:
    """What the callable returns travels in its canonical form, a moment with its microseconds."""
    lifted = KeyDefinition("order", lambda body: returned, type=key_type)
    assert stamp(stamper(lifted), {}, b"{}").headers["order"] == header


def test_a_key_of_the_body_sees_bytes_and_yields_to_the_caller() -> None:
    """The callable gets bytes even of a text body, and is not called where the header is given."""
    seen: list[Any] = []
    lifted = KeyDefinition("order", lambda body: seen.append(body))
    assert stamp(stamper(lifted), None, "ü").headers is None
    assert stamp(stamper(lifted), {"order": "mine"}, b"").headers["order"] == "mine"
    assert seen == ["ü".encode()]


def test_a_key_of_the_body_that_fails_is_refused_with_its_cause() -> None:
    """An error of the callable is an invalid key, chained, before anything is sent; or counted with "skip"."""

    def broken(_body: bytes) -> Any:
        raise KeyError("order")

    with pytest.raises(InvalidRelationshipKey) as caught:
        stamp(stamper(KeyDefinition("order", broken)))
    assert caught.value.reason == "source_failed"
    assert isinstance(caught.value.__cause__, KeyError)
    tolerant = stamper(KeyDefinition("order", broken), KeyDefinition("bad", lambda body: 1.5), on_invalid="skip")
    assert stamp(tolerant).headers is None
    assert tolerant.skipped == {("order", "source_failed"): 1, ("bad", "float"): 1}


@pytest.mark.parametrize("value", ["now", 1.5, True, datetime(2024, 1, 1, tzinfo=UTC)])
def test_a_time_header_that_is_no_integer_is_refused(value: Any) -> None:
    """The time header counts microseconds; anything else could not be found again."""
    with pytest.raises(InvalidRelationshipKey) as caught:
        stamp(stamper(), {"relatum_time": value})
    assert (caught.value.key, caught.value.reason) == ("relatum_time", "not_timestamp")


@pytest.mark.parametrize(("value", "good"), [(TIME_US_MIN, True), (TIME_US_MIN - 1, False), (TIME_US_MAX, True)])
def test_the_time_header_has_limits(value: int, good: bool) -> None:
    """The first and last moments pass, one microsecond before does not."""
    if good:
        stamp(stamper(), {"relatum_time": value})
        return
    with pytest.raises(InvalidRelationshipKey, match="out_of_range"):
        stamp(stamper(), {"relatum_time": value})


def test_a_timestamp_out_of_range_is_refused() -> None:
    """The property counts seconds; one after the year 9999 is a mistake."""
    stamp(stamper(), timestamp=TIME_US_MAX // 1_000_000)
    with pytest.raises(InvalidRelationshipKey) as caught:
        stamp(stamper(), timestamp=TIME_US_MAX // 1_000_000 + 1)
    assert caught.value.key == "timestamp"


def test_headers_may_be_as_deep_as_the_limit() -> None:
    """Sixteen levels pass, seventeen are refused, ten thousand too, and a table within itself."""
    stamp(stamper(), nested(HEADERS_DEPTH_MAX))
    endless: dict[str, Any] = {}
    endless["self"] = endless
    for headers in (nested(HEADERS_DEPTH_MAX + 1), nested(10_000), {"a": endless}):
        with pytest.raises(HeadersRefused) as caught:
            stamp(stamper(), headers)
        assert caught.value.reason == "too_deep"


def test_headers_may_be_as_many_as_the_limit() -> None:
    """Nested values count; at the limit they pass, one more is refused."""
    stamp(stamper(), {str(number): 1 for number in range(HEADERS_MAX)})
    stamp(stamper(), {"list": list(range(HEADERS_MAX - 1))})
    for headers in ({str(number): 1 for number in range(HEADERS_MAX + 1)}, {"list": list(range(HEADERS_MAX))}):
        with pytest.raises(HeadersRefused) as caught:
            stamp(stamper(), headers)
        assert caught.value.reason == "too_many"


def test_headers_may_be_as_large_as_the_limit() -> None:
    """The encoded size counts: at the limit they pass, one byte more is refused."""
    overhead = 4 + 1 + len("h") + 5
    stamp(stamper(), {"h": "x" * (HEADERS_BYTES_MAX - overhead)})
    for value in ("x" * (HEADERS_BYTES_MAX - overhead + 1), "ü" * (HEADERS_BYTES_MAX // 2), [b"x" * HEADERS_BYTES_MAX]):
        with pytest.raises(HeadersRefused) as caught:
            stamp(stamper(), {"h": value})
        assert caught.value.reason == "too_large"


def test_the_negotiated_frame_counts_with_all_properties() -> None:
    """On a connection of small frames, headers and properties together must fit into one."""
    small = stamper(frame_bytes_max=4096)
    stamp(small, {"h": "x" * 3800})
    with pytest.raises(HeadersRefused, match="4096"):
        stamp(small, {"h": "x" * 4000})
    with pytest.raises(HeadersRefused, match="4096"):
        stamp(small, {"h": "x" * 3800}, reply_to="r" * 200)


@given(
    st.dictionaries(
        st.text(max_size=20),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=300) | st.binary(max_size=300) | st.floats(),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
            max_leaves=20,
        ),
        max_size=10,
    )
)
def test_any_headers_are_stamped_or_refused_and_never_changed(headers: dict[str, Any]) -> None:
    """Whatever the headers: either our own error or the caller's headers, all of them, and ours after them."""
    before = copy.deepcopy(headers)
    try:
        got = stamp(stamper("order_id", KeyDefinition("n", type="integer"), on_invalid="skip"), headers)
    except HeadersRefused:
        pass
    else:
        ours = {name: value for name, value in (got.headers or {}).items() if name not in got.added}
        assert repr(ours) == repr(before)
    assert repr(headers) == repr(before)


@pytest.mark.parametrize("key_type", ["timestamp"])
def test_a_datetime_that_would_lose_its_fraction_is_refused(key_type: str) -> None:
    """An AMQP timestamp has whole seconds: what a look-up of the published value would not find, is not published."""
    whole = datetime(2024, 1, 1, 12, tzinfo=UTC)
    keyed = stamper(KeyDefinition("at", type=key_type))
    stamp(keyed, {"at": whole})
    stamp(keyed, {"at": whole.isoformat() + "", "other": whole.replace(microsecond=5)})
    stamp(keyed, {"at": 1_704_067_200_123_456})
    with pytest.raises(InvalidRelationshipKey, match="microseconds") as caught:
        stamp(keyed, {"at": whole.replace(microsecond=123_456)})
    assert (caught.value.key, caught.value.reason) == ("at", "fraction_of_a_second")
    composite = stamper(KeyDefinition("both", ["header:at", "header:host"], type=key_type))
    with pytest.raises(InvalidRelationshipKey):
        stamp(composite, {"at": whole.replace(microsecond=1), "host": "2024-01-01T00:00:00Z"})
