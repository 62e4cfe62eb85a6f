"""Live: the recorded messages that arrived last, those of a filter, masked as everywhere."""

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from relatum.store import make_engine
from tests.support import declare_stream, delete_stream, publish_plain, record, unique_name
from tests.support.web import Asking, asking
from tests.web.conftest import KEYS, World


@pytest.fixture(scope="module")
def engine(lively: World) -> Iterator[sa.Engine]:
    """The database, for recorders."""
    engine = make_engine(lively.options["database"])
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def stream(amqp_url: str, engine: sa.Engine) -> Iterator[str]:
    """A stream with recorded messages of several keys."""
    name = unique_name("live")
    declare_stream(amqp_url, name)
    messages = [(b"1", {"host": "a"}), (b"2", {"host": "b"}), (b"3", {"shelf": "a", "row": "1"}), (b"4", {})]
    publish_plain(amqp_url, name, [*messages, (b"5", {"order_id": "x"})])
    record(amqp_url, engine, name, keys=KEYS)
    yield name
    delete_stream(amqp_url, name)


@pytest.fixture(scope="module")
def page(lively: World, stream: str) -> Iterator[Asking]:
    """The page."""
    with asking(lively.page()) as page:
        yield page


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("", ["5", "4", "3", "2", "1"]),
        ("&key=host", ["2", "1"]),
        ("&key=host&value=b", ["2"]),
        ("&key=place&value=a&value=1", ["3"]),
        ("&key=order_id&limit=1", ["5"]),
    ],
)
def test_only_what_is_wanted_is_listed(page: Asking, stream: str, query: str, wanted: list[str]) -> None:
    """By stream, by key, by value in any form that the key takes, by the parts of a composite one: the newest first."""
    answer = page.get(f"/api/live?stream={stream}{query}").json()
    assert [row["preview"] for row in answer["results"]] == wanted
    shown = page.get(f"/live?stream={stream}{query}").text
    places = [shown.index(f"<code>{each}</code>") for each in wanted]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("key=nope", 404, "key_not_defined"),
        ("value=1", 400, "invalid_input"),
        ("key=place&value=1", 400, "invalid_key_definition"),
        ("stream=no-such-stream", 404, "stream_not_found"),
        ("limit=0", 400, "invalid_input"),
        ("x=1", 400, "invalid_input"),
    ],
)
def test_what_cannot_be_asked_is_refused(page: Asking, query: str, status: int, code: str) -> None:
    """With what to do; on the page as well."""
    refused = page.get(f"/api/live?{query}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    assert page.get(f"/live?{query}").status_code == status


def test_what_is_masked_is_masked_here_too(lively: World, amqp_url: str, engine: sa.Engine, stream: str) -> None:
    """In JSON and in rows: neither value nor body."""
    publish_plain(amqp_url, stream, [(b"secret-body", {"card": "4712"})])
    record(amqp_url, engine, stream, keys=KEYS)
    with asking(lively.page(masked_keys=("card",), mask_bodies=True)) as page:
        answer, shown = page.get(f"/api/live?stream={stream}"), page.get(f"/live?stream={stream}").text
    assert answer.json()["results"][0]["keys"][0]["is_masked"]
    for text in (answer.text, shown):
        assert "4712" not in text
        assert "secret-body" not in text
