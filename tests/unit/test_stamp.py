"""What the interceptor adds and refuses, that it changes nothing it was given, and how properties are sent."""

import copy
import logging
import pickle
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pika
import pytest
from aiormq.exceptions import AMQPConnectionError, DeliveryError
from hypothesis import given
from hypothesis import strategies as st
from pamqp.commands import Basic
from pika import BasicProperties
from pika.compat import long

import relatum
from relatum import errors
from relatum.common.limits import (
    HEADERS_BYTES_MAX,
    HEADERS_DEPTH_MAX,
    HEADERS_MAX,
    KEY_VALUE_BYTES_MAX,
    TIME_US_MAX,
    TIME_US_MIN,
)
from relatum.common.uuid7 import MARK, time_us_of, uuid7
from relatum.keys import KeyDefinition, as_definitions
from relatum.publishing import Stamper
from relatum.publishing._aio_pika import copy_of
from relatum.publishing._pika import copy_with
from relatum.publishing._publish_outcome import outcome
from tests.support.raising import raising


def stamp(stamper: Stamper, headers: dict[str, Any] | None = None, body: Any = b"", **properties: Any) -> Any:
    given = SimpleNamespace(**properties)
    return stamper.stamp(headers, properties.get("message_id"), properties.get("timestamp"), given, body)


def stamper(*keys: str | KeyDefinition, **options: Any) -> Stamper:
    return Stamper(as_definitions(keys), **options)


def nested(levels: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels):
        value = {"in": value}
    return {"outer": value}


def test_nothing_is_added_that_is_there() -> None:
    """A second stamp, or one of a message with its own id and time, adds nothing; no headers are made for an id."""
    first = stamp(stamper(), {"a": "b"}, message_id="mine")
    assert first.headers.keys() == {"a", "relatum_time"}
    assert stamp(stamper(), first.headers, message_id=first.message_id) == first
    assert [stamp(stamper(), headers).headers for headers in (None, {}, {"a": 1})] == [None, {}, {"a": 1}]
    got = stamp(stamper(), {"relatum_time": 5}, message_id="mine")
    assert (got.message_id, got.headers) == ("mine", {"relatum_time": 5})
    for timestamp in (1_700_000_000, datetime(2024, 1, 1, tzinfo=UTC)):
        assert stamp(stamper(), {}, timestamp=timestamp, message_id="mine").headers == {}


def test_a_good_value_is_sent_as_it_is() -> None:
    """Values up to the limits pass, in the type the caller gave them."""
    texts = ["", "x" * KEY_VALUE_BYTES_MAX, "ü" * (KEY_VALUE_BYTES_MAX // 2), b"ok"]
    for value in (*texts, 2**63 - 1, -(2**63), True, None):
        assert stamp(stamper("order_id"), {"order_id": value}).headers["order_id"] is value


def test_skip_counts_and_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    """With on_invalid="skip" headers stay as they are, and values are counted by reason and not shown."""
    tolerant = stamper("order_id", on_invalid="skip")
    with caplog.at_level(logging.WARNING, "relatum.interception"):
        for _ in range(3):
            assert stamp(tolerant, {"order_id": 1.5}).headers["order_id"] == 1.5
    assert tolerant.skipped == {("order_id", "float"): 3}
    assert len(caplog.records) == 1
    assert "1.5" not in caplog.text


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

    with raising(errors.InvalidRelationshipKey, reason="source_failed") as caught:
        stamp(stamper(KeyDefinition("order", broken)))
    assert isinstance(caught.value.__cause__, KeyError)
    tolerant = stamper(KeyDefinition("order", broken), KeyDefinition("bad", lambda body: 1.5), on_invalid="skip")
    assert stamp(tolerant).headers is None
    assert tolerant.skipped == {("order", "source_failed"): 1, ("bad", "float"): 1}


def test_times_are_within_limits() -> None:
    """The header counts microseconds and the property seconds; anything else could not be found again."""
    for value in (TIME_US_MIN, TIME_US_MAX):
        stamp(stamper(), {"relatum_time": value})
    strange = dict.fromkeys(("now", 1.5, True, datetime(2024, 1, 1, tzinfo=UTC)), "not_timestamp")
    for value, reason in (strange | dict.fromkeys((TIME_US_MIN - 1, TIME_US_MAX + 1), "out_of_range")).items():
        with raising(errors.InvalidRelationshipKey, key="relatum_time", reason=reason):
            stamp(stamper(), {"relatum_time": value})
    stamp(stamper(), timestamp=TIME_US_MAX // 1_000_000)
    with raising(errors.InvalidRelationshipKey, key="timestamp"):
        stamp(stamper(), timestamp=TIME_US_MAX // 1_000_000 + 1)


ENDLESS: dict[str, Any] = {}
ENDLESS["self"] = ENDLESS

TEXT_MAX = HEADERS_BYTES_MAX - (4 + 1 + len("h") + 5)
"""Bytes of one header's text where there is no other."""

LIMITS: dict[str, tuple[list[Any], list[Any]]] = {
    "too_deep": ([nested(HEADERS_DEPTH_MAX)], [nested(HEADERS_DEPTH_MAX + 1), nested(10_000), {"a": ENDLESS}]),
    "too_many": (
        [{str(number): 1 for number in range(HEADERS_MAX)}, {"list": list(range(HEADERS_MAX - 1))}],
        [{str(number): 1 for number in range(HEADERS_MAX + 1)}, {"list": list(range(HEADERS_MAX))}],
    ),
    "too_large": (
        [{"h": "x" * TEXT_MAX}],
        [{"h": value} for value in ("x" * (TEXT_MAX + 1), "ü" * (HEADERS_BYTES_MAX // 2), [b"x" * HEADERS_BYTES_MAX])],
    ),
}


@pytest.mark.parametrize("reason", LIMITS)
def test_headers_have_limits(reason: str) -> None:
    """Depth, number and encoded size: at the limit they pass, one more is refused, and a table within itself."""
    good, bad = LIMITS[reason]
    for headers in good:
        stamp(stamper(), headers)
    for headers in bad:
        with raising(errors.HeadersRefused, reason=reason):
            stamp(stamper(), headers)


def test_headers_must_fit_into_the_negotiated_frame() -> None:
    """On a connection of small frames, with what is added to them."""
    small = stamper(frame_bytes_max=4096)
    stamp(small, {"h": "x" * 3800})
    with raising(errors.HeadersRefused, reason="too_large"):
        stamp(small, {"h": "x" * 4000})


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
    except errors.HeadersRefused:
        pass
    else:
        theirs = {name: value for name, value in (got.headers or {}).items() if name in before}
        assert repr(theirs) == repr(before)
    assert repr(headers) == repr(before)


def test_a_datetime_that_would_lose_its_fraction_is_refused() -> None:
    """An AMQP timestamp has whole seconds: what a lookup of the published value would not find is not published."""
    whole = datetime(2024, 1, 1, 12, tzinfo=UTC)
    keyed = stamper(KeyDefinition("at", type="timestamp"))
    for headers in (
        {"at": whole},
        {"at": whole.isoformat(), "other": whole.replace(microsecond=5)},
        {"at": 17 * 10**14},
    ):
        stamp(keyed, headers)
    with raising(errors.InvalidRelationshipKey, key="at", reason="fraction_of_a_second"):
        stamp(keyed, {"at": whole.replace(microsecond=123_456)})
    composite = stamper(KeyDefinition("both", ["header:at", "header:host"], type="timestamp"))
    with pytest.raises(errors.InvalidRelationshipKey):
        stamp(composite, {"at": whole.replace(microsecond=1), "host": "2024-01-01T00:00:00Z"})


def test_stamped_copies_headers_and_gives_an_id_that_says_the_time() -> None:
    """The caller's headers stay as they are; id and time are of the same moment, unless the caller gives the time."""
    given = {"order_id": "o1"}
    headers, message_id = relatum.stamped(given)
    assert given == {"order_id": "o1"}
    assert set(headers) == {"order_id", "relatum_time"}
    assert abs(headers["relatum_time"] - time_us_of(message_id)) < 60_000_000
    assert relatum.stamped({"relatum_time": 5})[0] == {"relatum_time": 5}
    assert list(relatum.stamped()[0]) == ["relatum_time"]
    assert relatum.stamped()[1] != relatum.stamped()[1]
    with pytest.raises(errors.HeadersRefused):
        relatum.stamped({str(number): number for number in range(100_000)})


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (errors.PublishUnroutable, pika.exceptions.UnroutableError([])),
        (errors.PublishNacked, pika.exceptions.NackError([])),
        (errors.PublishOutcomeUnknown, pika.exceptions.ConnectionClosedByBroker(320, "CONNECTION_FORCED")),
        (errors.PublishOutcomeUnknown, pika.exceptions.StreamLostError("lost", ConnectionResetError(104, "reset"))),
        (errors.PublishNacked, DeliveryError(None, Basic.Nack(1))),
        (errors.PublishOutcomeUnknown, AMQPConnectionError("gone")),
        (errors.PublishOutcomeUnknown, TimeoutError()),
        (errors.PublishOutcomeUnknown, ConnectionResetError(104, "reset")),
    ],
)
def test_both_kinds_of_caller_catch_an_error(ours: type[errors.PublishError], theirs: Exception) -> None:
    """An error has our class and the client's, also after pickling; its class is made once, and `settle` is dropped."""
    error = outcome(ours, theirs, in_stream=False, settle=lambda: None)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) is type(outcome(ours, theirs, in_stream=None))
    assert not hasattr(again, "settle")
    for each in (error, again):
        assert isinstance(each, ours)
        assert isinstance(each, type(theirs))
        assert (str(each), each.in_stream) == (str(theirs), False)
    assert error.args == theirs.args
    for name in ("messages", "reply_code", "reply_text", "errno", "frame"):
        if hasattr(theirs, name):
            assert getattr(error, name) == getattr(theirs, name)
    assert outcome(ours, error, in_stream=None) is error


def test_ids_are_distinct_uuids_of_version_7() -> None:
    """An id has RFC 9562's layout; ids of one millisecond differ, also between threads, and ascend in a block."""
    now = time.time_ns()
    got = uuid.UUID(uuid7(now))
    assert (got.version, got.variant, got.int >> 80) == (7, uuid.RFC_4122, now // 1_000_000)
    ids = [uuid7(1) for _ in range(10_000)]
    assert len(set(ids)) == len(ids)
    blocks: dict[str, list[str]] = {}
    for one in ids:
        blocks.setdefault(one[19] + one[23:], []).append(one)
    assert all(block == sorted(block) for block in blocks.values())
    with ThreadPoolExecutor(8) as threads:
        made = threads.map(lambda _: [uuid7(2) for _ in range(10_000)], range(8))
    assert len({one for each in made for one in each}) == 80_000


@given(st.integers(0, TIME_US_MAX * 1000))
def test_an_id_says_when_it_was_made(time_ns: int) -> None:
    """To the microsecond or the one before, for any moment; later ids do not say earlier times."""
    time_us = time_us_of(uuid7(time_ns))
    assert time_us is not None
    assert time_ns - 1250 <= time_us * 1000 <= time_ns
    later_us = time_us_of(uuid7(time_ns + 1))
    assert later_us is not None
    assert later_us >= time_us


@given(st.uuids())
def test_other_ids_say_nothing(other: uuid.UUID) -> None:
    """No id, of another version, of a time that is none, of another end, random ones and UUIDv7 of any time."""
    ours = uuid7(time.time_ns())
    strange = [None, 7, "", MARK, ours.encode(), "0" * 30 + MARK, "mine-0000-0000-8000-8000000000" + MARK]
    changed = [ours[:14] + "4" + ours[15:], ours[:-1], ours.upper(), "f" * 8 + ours[8:], ours[:-6] + "c53a9f"]
    of_others = [str(each) for each in (other, uuid.UUID(int=other.int & ~(0xF << 76) | 0x7 << 76))]
    for each in (*strange, *changed, *(text for text in of_others if not text.endswith(MARK))):
        assert time_us_of(each) is None


texts = st.text(max_size=300) | st.sampled_from(["", "a", "\ud800", "x" * 255, "ü" * 128])
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**63), 2**63 - 1).map(long)
    | texts
    | st.binary(max_size=40)
    | st.sampled_from([Decimal("1.5"), datetime(2024, 1, 1, tzinfo=UTC), 1.5, object()]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = texts | st.sampled_from([b"bytes", 5, None])
headers = st.none() | st.dictionaries(names, values, max_size=5) | st.dictionaries(st.just("order_id"), texts)
ids = texts | st.just(uuid7(5)) | st.just("ü" * 36) | st.sampled_from([b"id", 7])
numbers = st.none() | st.integers(-1, 256)
maybe = st.none() | texts | st.just(5)
strings = ("content_type", "content_encoding", "correlation_id", "reply_to", "expiration", "type", "user_id", "app_id")
given_properties = st.fixed_dictionaries(
    {"message_id": ids},
    optional={
        "headers": headers,
        **dict.fromkeys(("delivery_mode", "priority", "timestamp"), numbers),
        **dict.fromkeys((*strings, "cluster_id"), maybe),
    },
)


def encoded(properties: BasicProperties) -> bytes | type[BaseException]:
    try:
        return b"".join(properties.encode())
    except Exception as error:
        return type(error)


@given(given_properties)
def test_properties_are_encoded_and_copied_as_pika_does(fields: dict[str, Any]) -> None:
    """A copy differs in headers and id alone, and is encoded to pika's bytes or raises pika's error."""
    properties = BasicProperties(**fields)
    ours = copy_with(properties, {"a": "b"}, "id")
    theirs = BasicProperties(**fields | {"headers": {"a": "b"}, "message_id": "id"})
    assert (encoded(ours), ours) == (encoded(theirs), theirs)
    assert properties == BasicProperties(**fields)


def marshalled(properties: Basic.Properties) -> Any:
    try:
        return properties.marshal()
    except Exception as error:
        return type(error), str(error)


@given(given_properties)
def test_they_are_sent_as_pamqp_sends_them(fields: dict[str, Any]) -> None:
    """A copy of pamqp's properties is equal to them, and marshals to the same bytes or the same error."""
    theirs = Basic.Properties()
    for name, value in fields.items():
        setattr(theirs, "message_type" if name == "type" else name, value)
    ours = copy_of(theirs)
    assert (marshalled(ours), ours) == (marshalled(theirs), theirs)
