"""Many look-ups at once, on the settings users have: the broker sees no more connections than a reader may have."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from relatum.reading import BrokerAddress
from relatum_consumer import AsyncRelations, Relations
from tests.support import publish_plain, record
from tests.support.proxy import Proxy
from tests.support.relations import FACES

LOOKUPS = 500
MESSAGES = 6
LATE = 8


@pytest.mark.parametrize("face", FACES)
def test_answers_of_several_messages_stay_within_the_limit(
    face: str, amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """500 at once are all answered, over 16 connections at most."""
    publish_plain(amqp_url, stream_name, [(b"x", {"order_id": "a"})] * MESSAGES)
    record(amqp_url, engine, stream_name, keys=["order_id"])
    with Proxy.to(stream_url) as proxy:
        address = BrokerAddress.parse(amqp_url, proxy.url(stream_url))
        if face == "blocking":
            with Relations(address, database_url, timeout_s=240) as relations:
                assert relations.statistics().opened == 0
                sizes = _in_threads(relations)
                statistics = relations.statistics()
        else:
            sizes, statistics = asyncio.run(_in_tasks(address, database_url))
        assert sizes == [MESSAGES] * LOOKUPS
        # Where some are closed, the proxy may see these end a moment after others have begun.
        assert proxy.most <= statistics.limit + LATE
        assert statistics.limit == 16
        assert (statistics.in_use, statistics.waiting, statistics.following) == (0, 0, 0)
        assert 1 <= statistics.idle <= statistics.limit
        assert statistics.opened == proxy.opened


def _in_threads(relations: Relations) -> list[int]:
    together = threading.Barrier(LOOKUPS)

    def look(_: int) -> int:
        together.wait(90)
        return len(relations.find("order_id", "a"))

    with ThreadPoolExecutor(LOOKUPS) as threads:
        return list(threads.map(look, range(LOOKUPS)))


async def _in_tasks(address: BrokerAddress, database_url: str):  # type: ignore[no-untyped-def]
    async with AsyncRelations(address, database_url, timeout_s=240) as relations:
        answers = await asyncio.gather(*(relations.find("order_id", "a") for _ in range(LOOKUPS)))
        return [len(answer) for answer in answers], relations.statistics()
