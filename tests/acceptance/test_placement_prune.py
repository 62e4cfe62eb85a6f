"""`relatum prune`, of sets that were released."""

import pika
import sqlalchemy as sa

import relatum as package
from relatum.store import placements
from relatum.superstreams import declare_super_stream, delete_super_stream
from tests.acceptance._command import Relatum
from tests.support import broker_connection, unique_name


def test_prune_forgets_sets_that_were_released_long_ago(
    amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine
) -> None:
    """Open ones and those of a moment ago stay; with names of streams, all stay."""
    relatum, name = Relatum(amqp_url, stream_url, database_url), unique_name()
    declare_super_stream(amqp_url, name, 1)
    with broker_connection(amqp_url) as connection, package.AffinityRouter(name, database_url) as router:
        channel = connection.channel()
        channel.confirm_delivery()
        for each in ("long ago", "just now", "open"):
            router.publish(channel, b"", pika.BasicProperties(headers={"affinity_set": each}))
    with package.AffinitySets(name, database_url, broker=amqp_url) as sets:
        sets.close_set("long ago")
        sets.close_set("just now")
    assert relatum.json("prune") == {}
    with engine.begin() as connection:
        aged = "UPDATE relatum.placements SET released_at = now() - interval '61 minutes' WHERE name = 'long ago'"
        connection.execute(sa.text(aged))
    assert relatum.json("prune") == {"": 1}
    with engine.connect() as connection:
        states = connection.execute(sa.select(placements.c.name, placements.c.state)).all()
    assert dict(states) == {"just now": "released", "open": "open"}
    delete_super_stream(amqp_url, name)
