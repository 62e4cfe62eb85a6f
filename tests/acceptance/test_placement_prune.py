"""`relatum prune`, of sets that were released."""

import sqlalchemy as sa

from relatum.contexts.placement._model import PlacementState
from relatum.contexts.placement._placement_store import PlacementStore
from relatum.reading import BrokerAddress
from relatum.superstreams import Layout
from tests.acceptance._command import Relatum


def test_prune_forgets_sets_that_were_released_long_ago(
    amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """Open ones and those of a moment ago stay; with names of streams, all stay."""
    relatum = Relatum(amqp_url, stream_url, database_url)
    vhost = BrokerAddress.parse(amqp_url, stream_url).vhost
    with PlacementStore(engine.url, vhost, stream_name) as store:
        store.open("affinity_set", Layout.of(stream_name, [(stream_name, "0")]))
        placed = store.place(["long ago", "just now", "open"], lambda _name, partitions: partitions[0])
        store.release([(name, placed[name].epoch) for name in ("long ago", "just now")])
        assert relatum.json("prune") == {}
        with engine.begin() as connection:
            aged = "UPDATE relatum.placements SET released_at = now() - interval '61 minutes' WHERE name = 'long ago'"
            connection.execute(sa.text(aged))
        assert relatum.json("prune") == {"": 1}
        assert [each.name for each in store.placements()] == ["open"]
        assert [each.name for each in store.placements(states=[PlacementState.RELEASED])] == ["just now"]
