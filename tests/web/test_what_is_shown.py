"""What the pages say of a few streams: gone ones, keys' letters, what arrived last, a NUL, links to traces."""

import re
from typing import Any

import pytest

from relatum.errors import ConfigurationError
from relatum.keys import KeyDefinition
from relatum.store import add_keys
from relatum_consumer.web import WebOptions
from tests.acceptance._command import Relatum
from tests.support import delete_stream
from tests.support.place import Place
from tests.support.web import Asking, asking, at
from tests.web.conftest import page_of
from tests.web.test_api import links


def test_a_deleted_stream_is_not_said_to_have_expired(place: Place, own: Asking, other_stream: str) -> None:
    """Page, documents and commands say that it was deleted, and what to do; its links lead to where that is said."""
    stream = place.stream
    place.put((b"", {"order_id": "b"}), to=other_stream)
    place.put((b"", {"order_id": "a"}), (b"", {"order_id": "b"}))
    place.record(stream, other_stream, keys=["order_id"])
    delete_stream(place.amqp, stream)
    for path in ("/search?key=order_id&value=a", "/trace?key=order_id&value=a"):
        answer = own.get(f"/api{path}").json()
        places = [(each["stream"], each["offset"]) for each in answer["deleted"]]
        assert (answer["status"], answer["expired"], places) == ("deleted", [], [(stream, 0)])
        assert f"relatum forget {stream}" in answer["advice"]
    for path in ("/?key=order_id&value=a", "/?key=order_id&value=b", "/trace?key=order_id&value=a"):
        shown = own.get(path).text
        assert "Stream deleted" in shown
        assert "Dropped by retention" not in shown
        assert at(stream) in links(own, path)
    (row,) = (each for each in own.get("/api/streams").json()["streams"] if each["stream"] == stream)
    assert row["state"] == "deleted"
    gone = own.get(at(stream, 0))
    assert (gone.status_code, f'href="{at(stream)}">The stream' in gone.text) == (404, True)
    assert "deleted: the broker does not have it any more" in own.get(at(stream)).text
    unknown = own.get(at(f"never-{stream}", 0))
    assert (unknown.status_code, "All streams</a>" in unknown.text) == (404, True)
    relatum = Relatum(place.amqp, place.stream_url, place.database)
    ended = relatum.run("find", "order_id", "a")
    assert (ended.returncode, "deleted: there was one" in ended.stdout) == (6, True)
    assert f"relatum forget {stream}" in ended.stdout
    ended = relatum.run("trace", "order_id", "a")
    assert (ended.returncode, "deleted: there was something" in ended.stdout) == (6, True)
    assert relatum.ok("status", stream).startswith(f"{stream}: deleted: relatum forget {stream}")


def test_a_stream_that_is_recorded_to_its_end_is_complete(place: Place) -> None:
    """That nobody records it now is nothing to worry about, until there is something that is not recorded."""
    place.put((b"", {"order_id": "a"}))
    place.record(keys=["order_id"])
    for state, words in (("complete", "complete, no recorder now"), ("unattended", "a part is not recorded")):
        with asking(page_of(place)) as page:
            (row,) = page.get("/api/streams").json()["streams"]
            assert row["state"] == state
            for path in ("/streams", at(place.stream)):
                assert words in page.get(path).text
        place.put(b"later")


def test_keys_keep_their_letters(place: Place) -> None:
    """Whatever keys come later, and wherever they are in the alphabet."""
    place.put((b"", {"order_id": "a", "about": "b"}))
    place.record(keys=["order_id", "zone"])

    def hues() -> dict[str, int]:
        with asking(page_of(place)) as page:
            found: list[dict[str, int]] = []
            for path in ("/", "/streams", at(place.stream, 0)):
                chips = re.findall(r'<a class="key hue(\d)" href="/\?key=(\w+)', page.get(path).text)
                found.append({key: int(hue) for hue, key in chips})
            assert all(hue == found[0][name] for hues in found for name, hue in hues.items())
            return found[0]

    before = hues()
    assert len(set(before.values())) == 2
    add_keys(place.engine, ["about"])
    after = hues()
    assert {name: after[name] for name in before} == before


def test_live_lists_what_arrived_last_and_only_what_is_wanted(place: Place, own: Asking, other_stream: str) -> None:
    """Old data published now comes first, whatever its own time; by stream, key, value, parts of a composite one."""
    definitions = ["host", "order_id", KeyDefinition("place", source=("header:shelf", "header:row"))]
    sent = [{"host": "a"}, {"host": "b"}, {"shelf": "a", "row": "1"}, {}, {"order_id": "x"}]
    place.put(*((b"%d" % n, headers | {"relatum_time": 1_800_000_000_000_000}) for n, headers in enumerate(sent, 1)))
    place.record(keys=definitions)  # it is in the log before the other is published
    place.put((b"old", {"relatum_time": 1_000_000_000_000_000}), to=other_stream)
    place.record(other_stream, keys=definitions)
    of_stream = f"&stream={place.stream}"
    for query, wanted in {
        "": ["old", "5", "4", "3", "2", "1"],
        "&limit=1": ["old"],
        of_stream: ["5", "4", "3", "2", "1"],
        f"{of_stream}&key=host": ["2", "1"],
        "&key=host&value=b": ["2"],
        "&key=place&value=a&value=1": ["3"],
        "&key=order_id&limit=1": ["5"],
    }.items():
        answer = own.get(f"/api/live?{query[1:]}").json()
        assert [row["preview"] for row in answer["results"]] == wanted
        shown = own.get(f"/live?{query[1:]}").text
        assert [shown.index(f"<code>{each}</code>") for each in wanted] == sorted(
            shown.index(f"<code>{each}</code>") for each in wanted
        )


def test_a_text_with_a_nul_is_shown_as_text(place: Place, own: Asking) -> None:
    """The NUL is seen, and the bytes are there as well."""
    place.put((b"before\0after", {"order_id": "a"}))
    place.record(keys=["order_id"])
    body = own.get(f"/api{at(place.stream, 0)}").json()["body"]
    assert (body["kind"], body["view"], body["text"]) == ("text", "text", "before⟨0⟩after")
    assert body["views"] == ["text", "hex"]
    assert "before⟨0⟩after" in own.get(at(place.stream, 0)).text


# --- links to traces elsewhere ----------------------------------------------------------------------------

ID = "4bf92f3577b34da6a3ce929d0e0e4736"
URL = "https://jaeger.example/trace/{trace_id}?from=relatum&x=1"
HEADERS: list[tuple[dict[str, Any], str | None]] = [
    ({"traceparent": f"00-{ID}-00f067aa0ba902b7-01"}, ID),
    ({"b3": f"{ID[:16]}-00f067aa0ba902b7-1"}, ID[:16]),
    ({"X-B3-TraceId": ID}, ID),
    ({"X-B3-TraceId": '"><script>alert(1)</script>'}, None),
    ({"X-B3-TraceId": "../../login"}, None),
    ({"X-B3-TraceId": "{trace_id}"}, None),
    ({"traceparent": "junk"}, None),
    ({}, None),
]


def test_a_message_links_to_its_trace_where_somebody_said_where(place: Place, own: Asking) -> None:
    """What is no id becomes no part of an address and no markup; a masked id is in no link; the policy stays."""
    place.put(*((b"", headers) for headers, _ in HEADERS))
    place.record(keys=["traceparent"])
    with asking(page_of(place, trace_url=URL)) as page:
        for offset, (_, trace_id) in enumerate(HEADERS):
            answer = page.get(at(place.stream, offset))
            if trace_id is None:
                assert "jaeger.example" not in answer.text
            else:
                href = URL.replace("{trace_id}", trace_id).replace("&", "&amp;")
                assert f'<a class="button" rel="noopener noreferrer" href="{href}">Trace</a>' in answer.text
            assert "<script>alert" not in answer.text
            assert "jaeger" not in answer.headers["Content-Security-Policy"]
    assert ">Trace</a>" not in own.get(at(place.stream, 0)).text
    with asking(page_of(place, trace_url=URL, masked_keys=("traceparent",))) as page:
        answer = page.get(at(place.stream, 0))
        assert (answer.status_code, ID in answer.text) == (200, False)


@pytest.mark.parametrize(
    "pattern",
    [
        "https://jaeger.example/trace/",
        "javascript:alert('{trace_id}')",
        "//jaeger.example/{trace_id}",
        "/trace/{trace_id}",
        "https://{trace_id}.example/",
        "https:///{trace_id}",
        "https://user:secret@jaeger.example/{trace_id}",
        "https://jaeger.example/{trace_id}/{span_id}",
        'https://jaeger.example/{trace_id}" onclick="x',
        "https://jaeger.example/ {trace_id}",
        "https://[jaeger/{trace_id}",
    ],
)
def test_a_pattern_that_cannot_be_is_an_error_at_the_start(pattern: str) -> None:
    """It says what one is."""
    with pytest.raises(ConfigurationError, match=r"https://jaeger.example/trace/\{trace_id\}"):
        WebOptions("amqp://localhost", "postgresql://localhost", trace_url=pattern)
