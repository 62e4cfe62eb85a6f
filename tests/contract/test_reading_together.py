"""What is asked of many streams together is what is asked of each alone; what was read is not read again."""

from collections.abc import Iterator

import pytest

from relatum import MessageId
from relatum.errors import OffsetNotFound, StreamNotFound
from relatum.reading import BrokerAddress, KeptChunks, Message, StreamReader
from tests.contract._faces import Face
from tests.contract.test_reading import fill
from tests.support import broker_connection, declare_stream, delete_stream, unique_name
from tests.support.proxy import Proxy


@pytest.fixture
def streams(amqp_url: str) -> Iterator[list[str]]:
    """More streams than are asked for in one go, each with a message more than the one before."""
    names = [unique_name(f"together-{n}") for n in range(10)]
    for count, name in enumerate(names, 1):
        declare_stream(amqp_url, name)
        fill(amqp_url, name, count)
    yield names
    for name in names:
        delete_stream(amqp_url, name)


def test_the_ends_of_many_streams(face: Face, amqp_url: str, streams: list[str], stream_name: str) -> None:
    """They are those of each alone; one that is empty, or no stream, or not there is left out, and harms none."""
    queue = unique_name("classic")
    with broker_connection(amqp_url) as connection:
        connection.channel().queue_declare(queue, durable=True)
    try:
        found = face.all_bounds([streams[0], unique_name("missing"), stream_name, queue, *streams[1:]])
    finally:
        delete_stream(amqp_url, queue)
    alone = {name: face.bounds(name) for name in streams}
    assert found == alone
    assert face.all_bounds([]) == {}


def test_the_last_offsets_of_many_streams(face: Face, streams: list[str]) -> None:
    """Asked for alone they are the same; the first is 0 for want of a question."""
    found = face.all_bounds(streams, lasts=streams[1:])
    assert found == face.all_bounds(streams)
    assert all(bounds.is_proven for bounds in found.values())


def test_what_is_kept_is_not_asked_for_again(face: Face, amqp_url: str, stream_name: str) -> None:
    """Neither by another order nor beside what is new: also when the stream is gone, its chunks are there."""
    fill(amqp_url, stream_name, 50)
    kept = KeptChunks()
    ids = [message.id for message in face.iterate(stream_name)]
    face.read_all(ids[10:20], kept=kept)
    found = face.read_all(reversed(ids), kept=kept)
    assert [message.id for message in found] == ids[::-1]
    nowhere = MessageId(stream_name, ids[-1].offset + 1)
    (missing,) = face.read_all([nowhere], kept=kept)
    assert isinstance(missing, OffsetNotFound)
    fill(amqp_url, stream_name, 1)
    assert face.read_all([ids[3], nowhere, ids[3]], kept=kept)[1].headers["n"] == 0
    delete_stream(amqp_url, stream_name)
    assert {type(each) for each in face.read_all(ids, kept=kept)} == {Message}
    assert {type(each) for each in face.read_all(ids)} == {StreamNotFound}


def test_a_stream_that_was_visited_is_read_ahead(face: Face, amqp_url: str, stream_name: str) -> None:
    """So that the next round finds there what follows, without asking the broker."""
    fill(amqp_url, stream_name, 40)
    kept = KeptChunks()
    ids = [message.id for message in face.iterate(stream_name)]
    face.read_all(ids[:1], kept=kept)
    kept.visited.add(stream_name)
    face.read_all(ids[20:21], kept=kept)
    delete_stream(amqp_url, stream_name)
    assert [each.id for each in face.read_all(ids[21:32], kept=kept)] == ids[21:32]


def test_many_attaches_go_over_several_connections(face: Face, streams: list[str]) -> None:
    """Of many streams they do; the results are the same and in order, and the next are where a reading is cut short."""
    ids = [MessageId(stream, 0) for stream in [*streams, *reversed(streams)]]
    assert [each.id for each in face.read_all(ids)] == ids
    assert [each.id for each in face.read_many(ids, take=3)] == ids[:3]
    assert [each.id for each in face.read_all(ids)] == ids


@pytest.mark.parametrize(("most", "lets_in", "opened"), [(16, True, 4), (16, False, 1), (2, True, 1)])
def test_connections_for_attaches_are_those_that_can_be_had(
    amqp_url: str, stream_url: str, streams: list[str], most: int, lets_in: bool, opened: int
) -> None:
    """Half of those a reader may have, and none beside the first where the broker lets nobody in."""
    ids = [MessageId(stream, 0) for stream in streams]
    with Proxy.to(stream_url) as proxy:
        address = BrokerAddress.parse(amqp_url, proxy.url(stream_url))
        with StreamReader.open(address, connections_max=most) as reader:
            proxy.accepts = lets_in
            assert [each.id for each in reader.read_all(ids) if isinstance(each, Message)] == ids
            assert (reader.statistics().opened, reader.statistics().in_use) == (opened, 0)
