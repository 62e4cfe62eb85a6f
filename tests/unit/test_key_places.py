"""Keys out of paths in headers and bodies, of traces' ids, and of the first of some places."""

import gzip
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.errors import InvalidKeyDefinition, InvalidRelationshipKey
from relatum.keys import KeyDefinition, SkipReason, bases
from relatum.keys._definition import VALUES_MAX
from relatum.keys._places import BODY_BYTES_MAX, parse_path, path_text, walk
from relatum.publishing import Stamper
from tests.support.raising import raising

JSON = "application/json"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def read(
    source: Any,
    body: Any = None,
    headers: dict[str, Any] | None = None,
    *,
    content_type: str | None = JSON,
    encoding: str | None = None,
    key_type: str = "text",
) -> tuple[list[str], list[str]]:
    properties = {"content_type": content_type, "content_encoding": encoding}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    base_of = bases(headers or {}, properties.get, lambda: content)
    values, reasons = KeyDefinition("k", source=source, type=key_type).read(base_of)
    return values, list(map(str, reasons))


@pytest.mark.parametrize(
    ("source", "body", "expected"),
    [
        ("body:$.order.id", {"order": {"id": "o1"}}, ["o1"]),
        ("body:$.order.id", {"order": {"id": 42}}, ["42"]),
        ("body:$.order.id", {"order": {"id": True}}, ["true"]),
        *(("body:$.order.id", body, []) for body in ({"order": {"id": None}}, {"order": "id"}, {})),
        ("body:$[1].id", [{"id": 1}, {"id": 2}], ["2"]),
        ("body:$[1].id", [{"id": 1}], []),
        ("body:$['order id']", {"order id": "o"}, ["o"]),
        ('body:$["it\'s"]', {"it's": "o"}, ["o"]),
        ("body:$.items[*].sku", {"items": [{"sku": "a"}, {"sku": "b"}, {}, {"sku": "a"}, 7]}, ["a", "b"]),
        ("body:$.items[*].sku", {"items": {"sku": "a"}}, []),
        ("body:$.a[*].b[*]", {"a": [{"b": [1, 2]}, {"b": [3]}]}, ["1", "2", "3"]),
        ("body:$.id", b'{"\\u0069d": "o"}', ["o"]),
        ("body:$.id", b'  {"id": 1, "id": 2}', ["2"]),
        (("body:$.a", "body:$.b"), {"a": 1, "b": "x|y"}, ["1|x\\|y"]),
        (("body:$.a", "body:$.b"), {"a": 1}, []),
    ],
)
def test_a_path_finds_what_lies_there(source: Any, body: Any, expected: list[str]) -> None:
    """A path finds members, indexes and each item of an array; a missing or null one is not a value and no error."""
    assert read(source, body) == (expected, [])


@pytest.mark.parametrize(
    ("value", "reasons"),
    [
        (b"18446744073709551616", ["float"]),
        (b"9223372036854775808", ["out_of_range"]),
        (b'"\\ud800"', ["not_json"]),
        (b"NaN", ["not_json"]),
        (b"-0", []),
    ],
)
def test_what_json_says_in_its_own_way(value: bytes, reasons: list[str]) -> None:
    """Numbers beyond 64 bits, minus zero, and what is not JSON: as a header of that value, or the reason."""
    found = read("body:$.id", b'{"id": %b}' % value)
    assert found[1] == reasons
    if reasons != ["not_json"]:
        assert found == read("header:id", b"", {"id": orjson.loads(value)})


@given(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.none(), max_size=1),
    st.sampled_from(["text", "integer", "timestamp"]),
)
def test_a_value_is_the_same_from_a_header_and_a_body(value: Any, key_type: str) -> None:
    """For all that JSON can carry as it is: numbers up to 64 bits, text of Unicode."""
    try:
        written = orjson.dumps({"id": value})
    except orjson.JSONEncodeError:
        return
    value = orjson.loads(written)["id"]
    assert read("body:$.id", written, key_type=key_type) == read("header:id", b"", {"id": value}, key_type=key_type)


@pytest.mark.parametrize(
    ("content_type", "encoding", "body", "expected"),
    [
        (None, None, b'{"id": 1}', (["1"], [])),
        (None, None, b'\n [{"id": 1}]', ([], [])),
        (None, None, b'{"id": broken', ([], [])),
        (None, None, b'"id"', ([], [])),
        (JSON, None, b'{"id": broken', ([], ["not_json"])),
        ("Application/JSON; charset=utf-8", "UTF-8", b'{"id": 1}', (["1"], [])),
        ("application/vnd.masstransit+json", "binary", b'{"id": 1}', (["1"], [])),
        (JSON, "gzip", b'{"id": 1}', ([], ["not_json"])),
        (JSON, "gzip", gzip.compress(b'{"id": 1}', mtime=0), ([], ["not_json"])),
        (None, "gzip", gzip.compress(b'{"id": 1}', mtime=0), ([], [])),
        (JSON, None, '{"id": "ü"}'.encode("latin-1"), ([], ["not_json"])),
        ("text/plain", None, b'{"id": 1}', ([], [])),
        ("application/x-python-serialize", "binary", b'{"id": 1}', ([], [])),
        (JSON, None, b'{"id": 1}' + b" " * BODY_BYTES_MAX, ([], ["body_too_large"])),
        (JSON, None, b'{"no": 1}' + b" " * BODY_BYTES_MAX, ([], [])),
        (JSON, None, b'{"id": ' + b"[" * 5000 + b"]" * 5000 + b"}", ([], ["not_json"])),
        (JSON, None, b"", ([], [])),
        (7, None, b'{"id": 1}', (["1"], [])),
    ],
)
def test_only_bodies_of_json_are_read(content_type: Any, encoding: str | None, body: bytes, expected: Any) -> None:
    """A body is read if its content type, or without one its first byte, is of JSON, up to a size and a depth."""
    assert read("body:$.id", body, content_type=content_type, encoding=encoding) == expected


def test_a_compressed_body_does_not_hide_another_source() -> None:
    """What a compressed body has is not known, so the next source counts; without one, the message is counted."""
    packed = gzip.compress(b'{"id": 1}', mtime=0)
    assert read("body:$.id or header:id", packed, {"id": "h"}, encoding="gzip") == (["h"], [])
    assert read("body:$.id or header:id", packed, encoding="gzip") == ([], ["not_json"])
    assert read("body:$.ids[*] or body:$.id", packed, encoding="br") == ([], ["not_json"])


def test_a_content_type_is_the_only_one_that_is_meant() -> None:
    """A source with a content type reads bodies of that type alone."""
    source = "body:application/cloudevents+json:$.id"
    assert read(source, {"id": 1}) == ([], [])
    assert read(source, {"id": 1}, content_type="application/cloudevents+json; charset=UTF-8") == (["1"], [])


def test_so_many_values_are_taken() -> None:
    """The first of them, in order, each once; that there are more is counted."""
    numbers = list(range(VALUES_MAX))
    assert read("body:$[*]", numbers + numbers) == (list(map(str, numbers)), [])
    assert read("body:$[*]", [*numbers, VALUES_MAX, 1.5]) == (list(map(str, numbers)), ["too_many_values"])
    assert read("body:$[*]", [1.5, "a", {}, "b"]) == (["a", "b"], ["float", "nested"])
    values, reasons = read("body:$[*]", [1.5] * 1000)
    assert (values, len(reasons), reasons[-1]) == ([], VALUES_MAX + 1, "too_many_values")


def test_a_body_is_decoded_once_and_only_where_it_is_needed() -> None:
    """A body is decoded once at most, and not for a value of a header, another content type or a missing member."""
    asked = []

    def body() -> bytes:
        asked.append(1)
        return b'{"id": "o1", "n": 5}'

    def with_type(content_type: str) -> Any:
        return bases({"h": "x"}, {"content_type": content_type}.get, body)

    assert KeyDefinition("k", source="header:h or body:$.id").read(with_type(JSON)) == (["x"], [])
    assert KeyDefinition("k", source="body:$.id").read(with_type("text/plain")) == ([], [])
    assert not asked
    base_of = with_type(JSON)
    found = [KeyDefinition("k", source=f"body:$.{name}").read(base_of)[0] for name in ("id", "n", "z")]
    assert found == [["o1"], ["5"], []]
    assert len(asked) == 1


def test_headers_have_paths_too() -> None:
    """A source with `$.` or `$[` is a path into a header; any other text is the header's name."""
    headers = {"x-a": {"b": [{"c": "deep"}]}, "a.b[0]": "flat", "$": "dollar", "x-many": ["p", "q"]}
    assert read("header:$.x-a.b[0].c", b"", headers) == (["deep"], [])
    assert read("header:$['x-many'][*]", b"", headers) == (["p", "q"], [])
    assert read("header:a.b[0]", b"", headers) == (["flat"], [])
    assert read("header:$['a.b[0]']", b"", headers) == (["flat"], [])
    assert read("header:$", b"", headers) == (["dollar"], [])
    assert read("header:$.x-a.b", b"", headers) == ([], ["nested"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", ([TRACE], [])),
        (f"cc-{TRACE}-b7ad6b7169203331-01-what-comes-later", ([TRACE], [])),
        (f"{TRACE}-b7ad6b7169203331-1-05e3ac9a4f6e3b90", ([TRACE], [])),
        ("a3ce929d0e0e4736-b7ad6b7169203331-1", (["a3ce929d0e0e4736"], [])),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", ([], ["not_trace_id"])),
        *((value, ([], ["not_trace_id"])) for value in ("00-XYZ-b7ad6b7169203331-01", "0", 7)),
        (None, ([], [])),
        (f"00-{TRACE}-b7ad6b7169203331-01".encode(), ([TRACE], [])),
    ],
)
def test_the_id_of_a_trace(value: Any, expected: Any) -> None:
    """A `traceparent` or a `b3` has the id of its trace; a value without one is counted as such."""
    assert read("trace-id:traceparent", b"", {"traceparent": value}) == expected
    if not isinstance(value, bytes):
        assert read("trace-id:body:$.trace.parent", {"trace": {"parent": value}}) == expected


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("body:$['order']['id']", "body:$.order.id"),
        ('body:$["a b"][0][*]', "body:$['a b'][0][*]"),
        ("body:$['it\\'s']", "body:$['it\\'s']"),
        ("body:Application/CloudEvents+JSON:$.id", "body:application/cloudevents+json:$.id"),
        ("header:$['x-a'].b", "header:$.x-a.b"),
        ("header:$['a']", "header:a"),
        ("header:$['$.a']", "header:$['$.a']"),
        ("header:cloudEvents:id or header:cloudEvents_id", "header:cloudEvents:id or header:cloudEvents_id"),
        ("header:this or that", "header:this or that"),
        ("trace-id:traceparent or trace-id:b3", "trace-id:traceparent or trace-id:b3"),
        ("trace-id:body:$.trace['parent']", "trace-id:body:$.trace.parent"),
    ],
)
def test_a_source_is_written_in_one_way(source: str, text: str) -> None:
    """A source has one normal form, which is read as the same source again."""
    key = KeyDefinition("k", source=source)
    assert key.sources == [text]
    assert KeyDefinition("k", source=tuple(key.sources)).components == key.components


@given(st.lists(st.none() | st.integers(0, 999_999_999) | st.text(min_size=1), min_size=1, max_size=16).map(tuple))
def test_any_path_is_read_as_it_is_written(path: tuple[Any, ...]) -> None:
    """Any path is read as it is written, whatever its members are called."""
    assert parse_path(path_text(path), key="k") == path


@given(
    st.recursive(st.none() | st.integers(), lambda each: st.lists(each) | st.dictionaries(st.text(), each)), st.data()
)
def test_walking_never_fails(value: Any, data: st.DataObject) -> None:
    """Walking a path through any value raises nothing and yields no None."""
    steps = st.none() | st.integers(0, 3) | st.text(max_size=1)
    assert None not in walk(value, tuple(data.draw(st.lists(steps, max_size=4))))


@pytest.mark.parametrize(
    "source",
    [
        *(f"body:{path}" for path in ("", "order.id", "$", "$.", "$..id", "$.*", "$.a[-1]", "$.a[1:2]", "$.a[?(@.b)]")),
        *(f"body:{path}" for path in ("$.a b", "json:$.a", "$" + ".a" * 17, "$." + "a" * 256)),
        "header:$[0].a",
        "header:$.",
        "property:content_type",
        "trace-id:",
        ("body:$.a[*]", "header:b"),
        " or ".join(["header:a"] * 9),
    ],
)
def test_what_is_no_place_is_refused(source: Any) -> None:
    """A source that is not a place is an error that names the key."""
    with raising(InvalidKeyDefinition, key="k"):
        KeyDefinition("k", source=source)


def test_a_publisher_is_told_what_cannot_be_recorded() -> None:
    """A bad value in headers or properties is refused before sending; bodies are sent as they are."""
    definitions = [
        KeyDefinition("order", source="body:$.order.id"),
        KeyDefinition("deep", source="header:$.a.b"),
        KeyDefinition("kind", source="body:$.kind or property:type"),
        KeyDefinition("route", source=("header:host", "property:app_id")),
    ]
    stamper = Stamper(definitions, read_property=lambda properties, name: (properties or {}).get(name))

    def stamp(body: Any, headers: Any = None, properties: Any = None) -> Any:
        return stamper.stamp(headers, "m", 1, properties, body).headers

    for body in (b'{"order": {"id": "o1"}}', b'{"order": {"id": 1.5}}', b'{"order": {"id": ', "ü", b"\x00\xff"):
        assert stamp(body, properties={"content_type": JSON}) is None
    with raising(InvalidRelationshipKey, key="deep", reason=SkipReason.NESTED):
        stamp(b"", {"a": {"b": "dropped on its way"}})
    with raising(InvalidRelationshipKey, key="kind", reason=SkipReason.NUL):
        stamp(b"{}", properties={"type": "x\0"})
    with pytest.raises(InvalidRelationshipKey, match="route"):
        stamp(b"{}", {"host": "a"}, {"app_id": "b\0"})
