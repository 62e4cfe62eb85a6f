"""Consumers that share groups: every complete group is given until it is acknowledged, to one member at a time."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import sqlalchemy as sa

from relatum.errors import ClaimLost
from relatum.grouping import GROUP_KEY
from relatum_consumer import Relations
from relatum_consumer.grouping import GroupConsumer
from tests.support import publish_plain, recording, wait_recorded
from tests.support.groups import group_id, of_group, shuffled, whole_group

Record = Callable[..., None]


@pytest.fixture
def relations(amqp_url: str, database_url: str) -> Iterator[Relations]:
    """Look-ups."""
    with Relations(amqp_url, database_url) as relations:
        yield relations


@pytest.fixture
def record(amqp_url: str, engine: sa.Engine) -> Record:
    """Records all that is in streams by now."""

    def run(*streams: str) -> None:
        with recording(amqp_url, engine, *streams, keys=[GROUP_KEY]):
            for stream in streams:
                wait_recorded(amqp_url, engine, stream)

    return run


def test_each_complete_group_is_given_until_it_is_acknowledged(
    relations: Relations, amqp_url: str, stream_name: str, record: Record
) -> None:
    """In the order of their first messages; what was acknowledged is not given again."""
    messages = [*whole_group(1, 3), *whole_group(2, 2), of_group(3, 1), of_group(3, 3, last=True)]
    publish_plain(amqp_url, stream_name, shuffled(messages, 1))
    record(stream_name)
    with relations.groups(stream_name, consumer="billing") as groups:
        given = list(groups)
        assert sorted(group.group_id for group in given) == [group_id(1), group_id(2)]
        assert [len(group) for group in given] == [3 if group.group_id == group_id(1) else 2 for group in given]
        given[0].acknowledge()
        given[0].acknowledge()
    with pytest.raises(ClaimLost):
        given[1].acknowledge()
    with relations.groups(stream_name, consumer="billing") as groups:
        (again,) = groups
        assert again.group_id == given[1].group_id
        assert again.deliveries == 2
        again.acknowledge()
    with closing(relations.groups(stream_name, consumer="billing")) as groups:
        assert list(groups) == []
    assert len(list(relations.groups(stream_name, consumer=GroupConsumer("shipping")))) == 2
