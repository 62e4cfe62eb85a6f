"""The link from a message to its trace: an id, in a pattern that was checked when the page started."""

from typing import Any

import pytest
import sqlalchemy as sa

from relatum.errors import ConfigurationError
from relatum_consumer.web import WebOptions
from tests.support import publish_plain, record
from tests.support.web import asking
from tests.web.conftest import World

ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{ID}-00f067aa0ba902b7-01"
URL = "https://jaeger.example/trace/{trace_id}?from=relatum&x=1"

HEADERS: list[tuple[dict[str, Any], str | None]] = [
    ({"traceparent": PARENT}, ID),
    ({"b3": f"{ID[:16]}-00f067aa0ba902b7-1"}, ID[:16]),
    ({"X-B3-TraceId": ID}, ID),
    ({"X-B3-TraceId": '"><script>alert(1)</script>'}, None),
    ({"X-B3-TraceId": "../../login"}, None),
    ({"X-B3-TraceId": "{trace_id}"}, None),
    ({"traceparent": "junk"}, None),
    ({}, None),
]


@pytest.fixture
def stream(amqp_url: str, engine: sa.Engine, stream_name: str) -> str:
    """A stream of messages with such headers."""
    publish_plain(amqp_url, stream_name, [(b"", headers) for headers, _ in HEADERS])
    record(amqp_url, engine, stream_name, keys=["traceparent"])
    return stream_name


def test_a_message_links_to_its_trace(world: World, database_url: str, stream: str) -> None:
    """Where it carries an id; what is none becomes no part of an address, and no markup. The policy stays as it was."""
    with asking(world.page(database=database_url, trace_url=URL)) as page:
        for offset, (_, trace_id) in enumerate(HEADERS):
            href = None if trace_id is None else URL.replace("{trace_id}", trace_id)
            answer = page.get(f"/message?stream={stream}&offset={offset}")
            if href is None:
                assert "jaeger.example" not in answer.text
            else:
                escaped = href.replace("&", "&amp;")
                assert f'<a class="button" rel="noopener noreferrer" href="{escaped}">Trace</a>' in answer.text
            assert "<script>alert" not in answer.text
            assert "jaeger" not in answer.headers["Content-Security-Policy"]


def test_there_is_no_link_unless_somebody_said_where(world: World, database_url: str, stream: str) -> None:
    """By default nothing leads elsewhere."""
    with asking(world.page(database=database_url)) as page:
        assert ">Trace</a>" not in page.get(f"/message?stream={stream}&offset=0").text


def test_a_masked_trace_is_not_linked(
    world: World, amqp_url: str, engine: sa.Engine, database_url: str, stream: str
) -> None:
    """By the page's option, or by a key on that header: the id would be in the link."""
    with asking(world.page(database=database_url, trace_url=URL, masked_keys=("traceparent",))) as page:
        answer = page.get(f"/message?stream={stream}&offset=0")
        assert answer.status_code == 200
        assert ID not in answer.text


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
