"""Streams are spread over connections where the broker has those of one wait for each other."""

from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from relatum.following import CaughtUp, Failed, Follower
from relatum.reading import BrokerAddress
from tests.support import new_streams, server_version
from tests.support.following import Taker
from tests.support.proxy import Proxy

STREAMS = 5


@pytest.fixture
def streams(amqp_url: str) -> Iterator[list[str]]:
    """New streams."""
    with new_streams(amqp_url, STREAMS) as names:
        yield names


@pytest.fixture
def proxy(stream_url: str) -> Iterator[Proxy]:
    """What the follower's connections go through."""
    parts = urlsplit(stream_url)
    with Proxy(parts.hostname or "127.0.0.1", parts.port or 0) as proxy:
        yield proxy


@pytest.fixture
def taker(amqp_url: str, stream_url: str, proxy: Proxy) -> Iterator[Taker]:
    """An open follower, and who takes from it."""
    address = BrokerAddress.parse(amqp_url, stream_url)
    with Taker(Follower(replace(address, stream_host="127.0.0.1", stream_port=proxy.port))) as taker:
        yield taker


def test_streams_are_spread_where_they_wait_for_each_other(
    taker: Taker, amqp_url: str, streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a broker that does not have them wait, one connection has room for all."""
    monkeypatch.setattr("relatum.following._subscriptions.CROWD", 2)
    for name in streams:
        taker.follower.follow(name, 0)
    for name in streams:
        taker.wait_event(name, CaughtUp)
    waits = server_version(amqp_url) < (4, 2, 1)
    assert taker.follower.statistics().connections == (3 if waits else 1)


def test_where_no_other_connection_is_let_in_streams_share_those_there_are(
    taker: Taker, proxy: Proxy, streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on connections costs time, and no stream."""
    monkeypatch.setattr("relatum.following._subscriptions.CROWD", 1)
    taker.follower.follow(streams[0], 0)
    taker.wait_event(streams[0], CaughtUp)
    proxy.accepts = False
    for name in streams[1:]:
        taker.follower.follow(name, 0)
    for name in streams:
        taker.wait_event(name, CaughtUp)
    assert taker.follower.statistics().connections == 1
    assert not any(taker.of(name, Failed) for name in [*streams, None])
