"""What the pages say and in which order: streams that are gone, keys' letters, what arrived last, a NUL in a text."""

import re
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from relatum.store import add_keys
from relatum_consumer.web import WebOptions
from tests.acceptance._command import Relatum
from tests.support import declare_stream, delete_stream, publish_plain, record, unique_name
from tests.support.web import asking, at
from tests.web.test_api import harmless


@pytest.fixture
def options(amqp_url: str, stream_url: str, database_url: str) -> WebOptions:
    """A page on a database of the test's own."""
    return WebOptions(amqp_url, database_url, stream_url, timeout_s=60.0)


@pytest.fixture
def other_stream(amqp_url: str) -> Iterator[str]:
    """A second stream."""
    name = unique_name("other")
    declare_stream(amqp_url, name)
    yield name
    delete_stream(amqp_url, name)


def test_a_deleted_stream_is_not_said_to_have_expired(
    amqp_url: str,
    stream_url: str,
    database_url: str,
    options: WebOptions,
    engine: sa.Engine,
    stream_name: str,
    other_stream: str,
) -> None:
    """Page, documents and commands say that it was deleted, and what to do; its links lead to where that is said."""
    publish_plain(amqp_url, other_stream, [(b"", {"order_id": "b"})])
    publish_plain(amqp_url, stream_name, [(b"", {"order_id": "a"}), (b"", {"order_id": "b"})])
    record(amqp_url, engine, stream_name, other_stream, keys=["order_id"])
    delete_stream(amqp_url, stream_name)
    with asking(options) as page:
        for path in ("/search?key=order_id&value=a", "/trace?key=order_id&value=a"):
            answer = page.get(f"/api{path}").json()
            places = [(each["stream"], each["offset"]) for each in answer["deleted"]]
            assert (answer["status"], answer["expired"], places) == ("deleted", [], [(stream_name, 0)])
            assert f"relatum forget {stream_name}" in answer["advice"]
        for path in ("/?key=order_id&value=a", "/?key=order_id&value=b", "/trace?key=order_id&value=a"):
            shown = page.get(path).text
            assert "Stream deleted" in shown
            assert "Dropped by retention" not in shown
            links = {attributes.get("href") for tag, attributes in harmless(shown).elements if tag == "a"}
            assert f"/stream?stream={stream_name}" in links
        (row,) = (each for each in page.get("/api/streams").json()["streams"] if each["stream"] == stream_name)
        assert row["state"] == "deleted"
        gone = page.get(f"/message?stream={stream_name}&offset=0")
        assert (gone.status_code, f'href="/stream?stream={stream_name}">The stream' in gone.text) == (404, True)
        assert "deleted: the broker does not have it any more" in page.get(f"/stream?stream={stream_name}").text
        unknown = page.get(f"/message?stream=never-{stream_name}&offset=0")
        assert (unknown.status_code, "All streams</a>" in unknown.text) == (404, True)
    relatum = Relatum(amqp_url, stream_url, database_url)
    ended = relatum.run("find", "order_id", "a")
    assert ended.returncode == 6
    assert "deleted: there was one" in ended.stdout
    assert f"relatum forget {stream_name}" in ended.stdout
    ended = relatum.run("trace", "order_id", "a")
    assert (ended.returncode, "deleted: there was something" in ended.stdout) == (6, True)
    assert relatum.ok("status", stream_name).startswith(f"{stream_name}: deleted: relatum forget {stream_name}")


def test_a_stream_that_is_recorded_to_its_end_is_complete(
    amqp_url: str, options: WebOptions, engine: sa.Engine, stream_name: str
) -> None:
    """That nobody records it now is nothing to worry about, until there is something that is not recorded."""
    publish_plain(amqp_url, stream_name, [(b"", {"order_id": "a"})])
    record(amqp_url, engine, stream_name, keys=["order_id"])
    for state, words in (("complete", "complete, no recorder now"), ("unattended", "a part is not recorded")):
        with asking(options) as page:
            (row,) = page.get("/api/streams").json()["streams"]
            assert row["state"] == state
            for path in ("/streams", f"/stream?stream={stream_name}"):
                assert words in page.get(path).text
        publish_plain(amqp_url, stream_name, [b"later"])


def test_keys_keep_their_letters(amqp_url: str, options: WebOptions, engine: sa.Engine, stream_name: str) -> None:
    """Whatever keys come later, and wherever they stand in the alphabet."""
    publish_plain(amqp_url, stream_name, [(b"", {"order_id": "a", "about": "b"})])
    record(amqp_url, engine, stream_name, keys=["order_id", "zone"])

    def hues() -> list[dict[str, int]]:
        with asking(options) as page:
            found: list[dict[str, int]] = []
            for path in ("/", "/streams", at(stream_name, 0)):
                chips = re.findall(r'<a class="key hue(\d)" href="/\?key=(\w+)', page.get(path).text)
                found.append({key: int(hue) for hue, key in chips})
            assert all(hue == found[0][name] for hues in found for name, hue in hues.items())
            return found[:1]

    (before,) = hues()
    assert len(set(before.values())) == 2
    add_keys(engine, ["about"])
    (after,) = hues()
    assert {name: after[name] for name in before} == before


def test_live_lists_what_arrived_last(
    amqp_url: str, options: WebOptions, engine: sa.Engine, stream_name: str, other_stream: str
) -> None:
    """Old data that is published now stands above what was published before it, whatever its own time."""
    for stream, time_us in ((stream_name, 1_800_000_000_000_000), (other_stream, 1_000_000_000_000_000)):
        publish_plain(amqp_url, stream, [(b"", {"order_id": "a", "relatum_time": time_us})])
        # It is in the log before the other is published.
        record(amqp_url, engine, stream, keys=["order_id"])
    with asking(options) as page:
        assert [each["stream"] for each in page.get("/api/live").json()["results"]] == [other_stream, stream_name]
        assert [each["stream"] for each in page.get("/api/live?limit=1").json()["results"]] == [other_stream]


def test_a_text_with_a_nul_is_shown_as_text(
    amqp_url: str, options: WebOptions, engine: sa.Engine, stream_name: str
) -> None:
    """The NUL is seen, and the bytes are there as well."""
    publish_plain(amqp_url, stream_name, [(b"before\0after", {"order_id": "a"})])
    record(amqp_url, engine, stream_name, keys=["order_id"])
    with asking(options) as page:
        body = page.get(f"/api/message?stream={stream_name}&offset=0").json()["body"]
        assert (body["kind"], body["view"], body["text"]) == ("text", "text", "before⟨0⟩after")
        assert body["views"] == ["text", "hex"]
        assert "before⟨0⟩after" in page.get(f"/message?stream={stream_name}&offset=0").text
