"""What programs rely on: each command's exit code, and the form of what it prints with `--json`.

`commands.json` keeps the form; to change it, run with `RELATUM_KEEP_ANSWERS=1`, and say it in the change log.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from relatum import MessageId
from relatum.collecting import Collected, OutcomeStatus
from relatum.collecting._collector_core import Advance, Result
from relatum.contexts import SerialConsumer
from relatum.membership import GROUP_KEY
from relatum_consumer import GroupConsumer, Relations
from tests.acceptance._command import Relatum
from tests.support import broker_connection, delete_stream, unique_name, wait_until
from tests.support.collectors import StoreMember
from tests.support.forms import form, in_words
from tests.support.groups import group_id, of_group, whole_group
from tests.support.place import Place
from tests.support.super_streams import super_stream

KEPT: Final = Path(__file__).with_name("commands.json")

WHOLE, LACKING = 1, 2

COMMANDS: Final = """
migrate --current
migrate
keys add late
keys list
tap EXCHANGE --stream TAPPED
tap --list
untap EXCHANGE
find order_id 7
find order_id 99
find order_id 8 --complete
related STREAM 0
related STREAM 2 --to STREAM --time before
around 1970-01-01T00:00:02
trace STREAM 0
trace cause a
groups --older-than 0
groups --group WHOLE
groups --group LACKING
groups --consumer CONSUMER
expect add paid --of STREAM --by order_id --follows OTHER --within 1s
expect list
missing paid --since 1970-01-01T00:00:00
read STREAM 0 1
status STREAM
status --collector
outcome succeeded
outcome dead nobody
backfill STREAM
verify STREAM
verify OTHER
forget OTHER --yes
forget OTHER --yes
forget STREAM --origin
forget STREAM --dry-run
prune
super-stream describe SUPER
super-stream route SUPER k
contexts assign SUPER a b c --to SUPER-0
contexts status SUPER
contexts list SUPER
contexts show SUPER a
contexts show SUPER nobody
contexts rebalance SUPER --dry-run
contexts move SUPER a --to SUPER-1
contexts moves SUPER --latest 1
contexts consolidate SUPER SUPER-1 --to SUPER-0
contexts rebalance SUPER
contexts resume SUPER
contexts add-partition SUPER
contexts consumers SUPER
contexts verify SUPER
affinity list SUPER
affinity show SUPER a
affinity show SUPER nobody
affinity move SUPER a --to SUPER-2
affinity close SUPER a
super-stream delete SUPER --yes
super-stream declare SUPER --partitions 2
"""
"""The commands in the order in which they are run; words in capitals mean names of this run."""


def publish(place: Place, other: str) -> None:
    """Three orders, what names another message, and two groups: one complete, one not; all recorded but the last."""
    orders: list[dict[str, Any]] = [{"order_id": 7, "id": "a"}, {"order_id": 7, "cause": "a"}, {"order_id": 9}]
    place.put(*[(b"order", headers | {"relatum_time": second * 10**6}) for second, headers in enumerate(orders, 1)])
    place.put(*whole_group(WHOLE, 2), of_group(LACKING, 2, time_us=10**6))
    place.put((b"", {"order_id": 9, "relatum_time": 9 * 10**6}), to=other)
    place.record(place.stream, other, keys=["order_id", "id", GROUP_KEY])


@pytest.fixture
def collector(place: Place) -> StoreMember:
    """A collector that has read two messages of the stream: one succeeded, one is dead."""
    member = StoreMember(place.database, lease_s=3600)
    member.follow(place.stream, 0)
    taken = [Collected(MessageId(place.stream, at), name, "order", 1, None) for at, name in enumerate(FINISHED)]
    member.add(taken)
    member.add([], Advance(place.stream, 0, 3, passed_over=1))
    member.forward(7, [each.place for each in taken])
    member.finish(7, [Result(each.place, OutcomeStatus(each.message_id), FINISHED[each.message_id]) for each in taken])
    return member


FINISHED: Final = {"succeeded": None, "dead": "took too long"}


@pytest.fixture
def super_stream_name(relatum: Relatum) -> Iterator[str]:
    with super_stream(relatum.broker, 2) as layout:
        yield layout.super_stream


@pytest.fixture
def exchange(relatum: Relatum) -> Iterator[str]:
    name = unique_name("orders")
    with broker_connection(relatum.broker_url) as connection:
        channel = connection.channel()
        channel.exchange_declare(name, "topic")
        yield name
        channel.exchange_delete(name)
        delete_stream(relatum.broker_url, f"tap.{name}")


def consume(relatum: Relatum, stream: str, layout: str) -> None:
    """Take a group as a consumer of groups, and consume the super stream in order: both are known afterwards."""
    with (
        Relations(relatum.broker, relatum.database_url) as relations,
        relations.groups(stream, consumer=GroupConsumer("billing"), on_conflict="skip") as groups,
    ):
        next(groups).acknowledge()
    with SerialConsumer(layout, "billing", broker=relatum.broker, database=relatum.database_url) as consumer:
        wait_until(lambda: all(each.holder for each in consumer.status().partitions), what="all partitions taken")


@pytest.mark.usefixtures("collector")
def test_commands_keep_their_form(
    relatum: Relatum, place: Place, other_stream: str, super_stream_name: str, exchange: str
) -> None:
    """Each command ends with the code, and prints the names and types, that are kept."""
    relatum.ok("keys", "add", "order_id", "id")
    relatum.ok("keys", "add", "cause", "--names", "id")
    publish(place, other_stream)
    consume(relatum, place.stream, super_stream_name)
    names = {
        "STREAM": place.stream,
        "OTHER": other_stream,
        "SUPER": super_stream_name,
        "TAPPED": f"tap.{exchange}",
        "EXCHANGE": exchange,
        "WHOLE": group_id(WHOLE),
        "LACKING": group_id(LACKING),
        "CONSUMER": "billing",
    }
    said: dict[str, Any] = {}
    for line in COMMANDS.strip().splitlines():
        if line == "find order_id 8 --complete":
            place.put((b"", {"order_id": 8}))
        words = line
        for word, name in names.items():
            words = words.replace(word, name)
        ended = relatum.run(*words.split(), "--json")
        shown = ended.stdout
        for word, name in names.items():
            shown = shown.replace(name, word)
        said.setdefault(line, []).append({"code": ended.returncode, "form": in_words(form(parsed(shown)))})
    if os.environ.get("RELATUM_KEEP_ANSWERS"):
        KEPT.write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
    assert said == json.loads(KEPT.read_text())


def parsed(text: str) -> Any:
    """One document, or a list of JSON lines, or nothing."""
    try:
        return json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]
