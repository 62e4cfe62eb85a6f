"""Where a stream lies on another node than the one connected to."""

from urllib.parse import urlsplit

import pytest

from relatum.errors import StreamUnavailable
from tests.contract._faces import FACES, open_face
from tests.contract._node import EmptyNode, SilentLeader
from tests.support import publish_plain


def through(url: str, port: int) -> str:
    """The URL with another port."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{port}").geturl()


@pytest.mark.parametrize("name", FACES)
def test_a_stream_on_another_node(name: str, amqp_url: str, stream_url: str, stream_name: str) -> None:
    """A reader goes to the node that has the stream."""
    publish_plain(amqp_url, stream_name, [b"0", b"1"])
    with EmptyNode(urlsplit(stream_url).port or 0) as node, open_face(name, through(stream_url, node.port)) as face:
        assert face.read(stream_name, 1).body == b"1"
        assert face.bounds(stream_name) == (0, 1)
        assert [message.body for message in face.iterate(stream_name)] == [b"0", b"1"]
        assert [message.body for message in face.read_many([(stream_name, 1)])] == [b"1"]  # type: ignore[list-item]


@pytest.mark.parametrize("name", FACES)
def test_a_node_that_cannot_be_reached(name: str, stream_url: str, stream_name: str) -> None:
    """Where no other node can be reached, the stream is unavailable, in time."""
    with EmptyNode(1) as node, open_face(name, through(stream_url, node.port), timeout_s=6) as face:
        for attempt in (lambda: face.read(stream_name, 0), lambda: face.iterate(stream_name)):
            with pytest.raises(StreamUnavailable):
                attempt()


@pytest.mark.parametrize("name", FACES)
def test_a_leader_that_shows_nothing_of_what_is_written(name: str, stream_url: str, stream_name: str) -> None:
    """It is waited for as long as may be, and its stream never taken for empty; one that has nothing written is."""
    with (
        SilentLeader(0) as node,
        open_face(name, through(stream_url, node.port), timeout_s=6) as face,
        pytest.raises(StreamUnavailable),
    ):
        face.bounds(stream_name)
    with SilentLeader(-1) as node, open_face(name, through(stream_url, node.port)) as face:
        assert face.bounds(stream_name) == (None, None)
