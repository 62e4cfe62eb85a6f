"""`relatum status --collector`, `relatum outcome` and `relatum prune`, of what a collector left in the database."""

from collections.abc import Iterator

import pytest

from relatum import MessageId
from relatum.collecting import Collected, OutcomeStatus
from relatum.collecting._collector_core import Advance, Result
from relatum_cli.exits import ExitCode
from tests.acceptance._command import Relatum
from tests.support.collectors import StoreMember
from tests.support.place import Place

BULK = 7

pytestmark = pytest.mark.usefixtures("collected")


@pytest.fixture
def collected(place: Place) -> Iterator[None]:
    """A collector of six out of ten messages: each in another state, one of no type, one of a type nobody runs."""
    place.put(*(b"%d" % n for n in range(10)))
    stream, member = place.stream, StoreMember(place.database, keep_s=3600)
    member.follow(stream, 0)
    kinds = ("succeeded", "failed", "dead", "forwarded", "collected")
    entries = [Collected(MessageId(stream, offset), kind, "order", 1, None) for offset, kind in enumerate(kinds)]
    member.add([*entries, Collected(MessageId(stream, 9), "other", "invoice", 1, None)])
    member.add([], Advance(stream, 0, 6, passed_over=1))
    member.forward(BULK, [entry.place for entry in entries[:4]])
    reasons = dict(zip(entries[:3], (None, "no such customer", "took too long"), strict=True))
    member.finish(BULK, [Result(each.place, OutcomeStatus(each.message_id), why) for each, why in reasons.items()])
    yield
    member.store.dispose()


def test_outcomes_are_shown_and_end_with_what_needs_doing(relatum: Relatum) -> None:
    """The exit code is that of a failure, else of an unknown message, else of one that is not final."""
    succeeded = relatum.run("outcome", "succeeded")
    assert succeeded.returncode == ExitCode.OK, succeeded.stderr
    assert "billing" in succeeded.stdout
    codes = {
        ("forwarded",): ExitCode.NOT_YET,
        ("collected", "succeeded"): ExitCode.NOT_YET,
        ("nobody", "forwarded"): ExitCode.NOT_THERE,
        ("failed", "nobody"): ExitCode.UNSUCCESSFUL,
        ("dead",): ExitCode.UNSUCCESSFUL,
    }
    for ids, code in codes.items():
        assert relatum.run("outcome", *ids).returncode == code, ids
    document = relatum.json("outcome", "dead", "nobody")
    shown = [(each["message_id"], each["status"], each["is_final"]) for each in document]
    assert shown == [("dead", "dead", True), ("nobody", "unknown", False)]
    assert document[0]["attempts"] == 1
    assert relatum.json("outcome", "dead", "--collector", "billing")[0]["status"] == "dead"
    misspelt = relatum.run("outcome", "dead", "--collector", "biling")
    assert misspelt.returncode == ExitCode.NOT_THERE
    assert "'biling'" in misspelt.stderr


def test_status_shows_collectors(relatum: Relatum, stream_name: str) -> None:
    """A collector's status has members, positions with their lag, counts by state, and types without an executor."""
    [status] = relatum.json("status", "--collector")
    assert (status["collector"], status["keep_s"]) == ("billing", 3600)
    assert status["counts"] == {"collected": 2, "forwarded": 1, "succeeded": 1, "failed": 1, "dead": 1}
    assert status["unattended"] == {"invoice": 1}
    assert status["oldest_unfinished_at"]
    [source] = status["sources"]
    assert (source["stream"], source["position"], source["lag_offsets"]) == (stream_name, 6, 4)
    assert source["passed_over"] == 1
    [member] = status["members"]
    assert member["is_alive"]
    assert source["follower"] == member["holder"]
    assert relatum.json("status", "--collector", "billing") == [status]
    shown = relatum.ok("status", "--collector", "billing")
    assert f"{stream_name}\t6\t4\t" in shown
    assert "invoice" in shown
    assert relatum.run("status", "--collector", "nobody").returncode == ExitCode.NOT_THERE


def test_prune_forgets_what_was_finished_long_ago(relatum: Relatum, place: Place) -> None:
    """Pruning forgets just the outcomes that are older than they are kept, which are unknown afterwards."""
    assert relatum.json("prune") == {}
    finished = "UPDATE relatum.collected_messages SET finished_at = now() - interval '61 minutes'"
    place.sql(f"{finished} WHERE message_id = 'succeeded'")
    assert relatum.json("prune") == {"": 1}
    assert relatum.run("outcome", "succeeded").returncode == ExitCode.NOT_THERE
    assert relatum.run("outcome", "failed").returncode == ExitCode.UNSUCCESSFUL
