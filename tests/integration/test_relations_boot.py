"""Look-ups while a broker boots, with the settings users have: right, or to be repeated, never a part."""

import random
from collections import Counter

import sqlalchemy as sa

from relatum.errors import RelatumError, Transient
from relatum.local import LocalServers
from relatum_consumer import Relations, Status
from tests.support import (
    declare_stream,
    publish_plain,
    record,
    wait_until,
)

STREAMS = ("orders", "payments", "parcels", "letters")


def test_while_a_broker_boots_no_answer_is_a_part(
    private_servers: LocalServers, engine: sa.Engine, is_long: bool
) -> None:
    """One message in each of four streams: all four are found, or the answer is an error that says to repeat it."""
    chance, server = random.Random(14), private_servers.rabbitmq
    for stream in STREAMS:
        declare_stream(server.broker_url, stream)
        publish_plain(server.broker_url, stream, [(stream.encode(), {"order_id": "a"})])
    record(server.broker_url, engine, *STREAMS, keys=["order_id"])
    told: Counter[str] = Counter()

    def ask() -> bool:
        names = chance.choice([None, STREAMS])
        try:
            with Relations(server.broker_url, engine.url, timeout_s=5) as relations:
                answer = relations.find("order_id", "a", streams=names, complete=chance.random() < 0.3)
        except Transient:
            told["to be repeated"] += 1
            return False
        except RelatumError as error:
            told[type(error).__name__] += 1
            return False
        told[f"{answer.status} {len(answer) + len(answer.unread)} of {len(STREAMS)}"] += 1
        return answer.status is Status.FOUND

    for _ in range(50 if is_long else 2):
        server.kill()
        assert not ask()
        server.launch()
        wait_until(ask, limit_s=120, every_s=0.0, what="an answer")
        server.await_answer()
    print(f"\n{dict(told)}")
    wrong = set(told) - {"to be repeated", "found 4 of 4", "unproven 4 of 4"}
    assert not wrong, told
