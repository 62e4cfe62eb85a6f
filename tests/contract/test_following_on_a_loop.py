"""A follower on its owner's loop: what defects, forks, frozen nodes and restarts leave of it."""

import gc
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relatum import Broker
from relatum.errors import UsedAfterFork
from relatum.following import Attached, CaughtUp, Event, Failed, Records
from relatum.waiting import Outages, Server
from tests.support import declare_stream, new_streams, publish_plain, unique_name, wait_until
from tests.support.following import Owner
from tests.support.forking import in_child
from tests.support.proxy import Proxy
from tests.support.tls import TlsBroker

QUICK = {"heartbeat_s": 1, "timeout_s": 2.0}

GOES_ON_S = 1.0
"""Seconds within which a parent that was not harmed has the next message."""

STREAMS = 130
"""Streams that lose their connection together: more than one connection has of them with an old broker."""


@pytest.fixture
def proxy(stream_url: str) -> Iterator[Proxy]:
    """What the follower's connections go through."""
    with Proxy.to(stream_url) as proxy:
        yield proxy


@pytest.fixture
def address(broker: Broker, stream_url: str, proxy: Proxy) -> Broker:
    """The broker, through the proxy."""
    return replace(broker, stream_url=proxy.url(stream_url))


def test_a_parent_goes_on_whatever_its_child_does(amqp_url: str, stream_name: str, address: Broker) -> None:
    """The child closes, drops and collects all it has a copy of."""
    owners = [Owner(address, **QUICK)]
    with owners[0] as owner:
        owner.follow(stream_name)
        publish_plain(amqp_url, stream_name, [b"0"])
        wait_until(lambda: owner.of(stream_name, CaughtUp), what="the stream read")

        def end() -> None:
            copied = owners.pop()
            with pytest.raises(UsedAfterFork):
                copied.follower.follow(stream_name, 0)
            coroutine = copied.follower.close()
            with pytest.raises(StopIteration):
                coroutine.send(None)
            assert copied.loop.stop(0)
            assert copied.loop.run(copied.follower.close) is None
            vars(copied).clear()
            del copied
            gc.collect()

        in_child(end)
        publish_plain(amqp_url, stream_name, [b"1"])
        began = time.monotonic()
        wait_until(lambda: owner.offsets(stream_name) == [0, 1], what="the next message")
        assert time.monotonic() - began < GOES_ON_S
        assert len(owner.of(stream_name, Attached)) == 1


@pytest.mark.parametrize("kind", [Attached, Records, CaughtUp, Failed])
def test_a_defect_of_its_owner_ends_nothing(
    amqp_url: str, stream_name: str, address: Broker, proxy: Proxy, kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and all is given nevertheless, in order."""
    raised = list[Event]()

    def on_event(event: Event) -> None:
        if isinstance(event, kind) and not raised:
            raised.append(event)
            raise ZeroDivisionError

    publish_plain(amqp_url, stream_name, [b"%d" % number for number in range(100)])
    with Owner(address, on_event, **QUICK) as owner, caplog.at_level(logging.CRITICAL, "relatum.follower"):
        owner.follow(stream_name)
        wait_until(lambda: owner.of(stream_name, CaughtUp), what="the stream read")
        proxy.reset()
        publish_plain(amqp_url, stream_name, [b"100"])
        wait_until(lambda: len(owner.offsets(stream_name)) >= 101, what="the last message")
        assert owner.offsets(stream_name) == list(range(101))
        assert raised


def test_a_frozen_node_is_noticed_and_its_connection_closed(
    amqp_url: str, stream_name: str, address: Broker, proxy: Proxy
) -> None:
    """By its silence; closing waits for nothing that it would have to read."""
    with Owner(address, **QUICK) as owner:
        owner.follow(stream_name)
        wait_until(lambda: owner.of(stream_name, CaughtUp), what="the stream read")
        proxy.mode = "frozen"
        began = time.monotonic()
        wait_until(lambda: owner.of(None, Failed), what="the silence noticed")
        assert time.monotonic() - began < 10
        assert owner.follower.statistics().connections == 0
        began = time.monotonic()
        assert owner.close(30)
        # A call that waits for the broker lets go of it, and says goodbye.
        assert time.monotonic() - began < 3
        proxy.mode = "pass"


def test_streams_are_followed_over_tls(tmp_path: Path) -> None:
    """Also what TLS has unpacked already, which makes no socket readable, and what comes after a pause."""
    with TlsBroker(tmp_path) as tls:
        stream = unique_name()
        declare_stream(tls.server.broker_url, stream)
        for _ in range(8):
            publish_plain(tls.server.broker_url, stream, [b"x" * 50_000] * 20)
        url = tls.url("rabbitmq-stream+tls://{login}{secure_streams}?{ca}")
        with Owner(url, bytes_max=1 << 20, heartbeat_s=1) as owner:
            owner.follow(stream)
            wait_until(lambda: owner.of(stream, CaughtUp), what="the stream read")
            assert owner.offsets(stream) == list(range(160))
            publish_plain(tls.server.broker_url, stream, [b"last"])
            wait_until(lambda: len(owner.offsets(stream)) == 161, what="the last message")


def test_many_streams_that_lose_the_broker_together_tell_so_once(
    amqp_url: str, address: Broker, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log, no failure of a stream, a subscription for each, and few connections."""
    logger = logging.getLogger("relatum.test-following")
    outages = Outages(logger, broker="b:1")
    with new_streams(amqp_url, STREAMS) as streams, Owner(address, outages=outages, **QUICK) as owner:
        owner.follow(*streams)
        wait_until(lambda: all(owner.of(each, CaughtUp) for each in streams), what="all streams read")
        opened = proxy.opened
        proxy.accepts = False
        proxy.reset()
        wait_until(lambda: not outages.is_up(Server.BROKER), what="the broker away")
        proxy.accepts = True
        wait_until(lambda: all(len(owner.of(each, CaughtUp)) == 2 for each in streams), what="all streams read again")
        lines = [each for each in caplog.records if each.name == logger.name and each.levelno >= logging.WARNING]
        assert len(lines) == 1
        assert not any(owner.of(each, Failed) for each in streams)
        assert all(len(owner.of(each, Attached)) == 2 for each in streams)
        assert len(owner.of(None, Failed)) <= 8
        assert proxy.opened - opened <= 8
