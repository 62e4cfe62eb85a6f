"""Members of a group consumer are harmed: what they wrote down, the stream and the states of groups agree."""

import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from itertools import count
from pathlib import Path

from pika import BasicProperties

from relatum.membership import GROUP_KEY
from relatum.store.database import as_engine
from tests.acceptance._command import Relatum
from tests.acceptance._harm import WORKS_S, Harm, Party, assert_no_traceback, leaves_sockets, start_logged
from tests.support import declare_stream, read_stream, record, unique_name, wait_until
from tests.support.groups import Plain, of_group, shuffled, whole_group
from tests.support.publishing import StubbornLoad

pytestmark = leaves_sockets

MEMBERS = 3
SIZE = 4
MIXED = 10
"""Groups whose messages are mixed; one of them never gets all of its messages."""

LEASE_S = 1.0
"""Of the members: `_group_member.py`."""

STATES = "SELECT group_id, state FROM relatum.group_states"
DONE = "SELECT count(*) FROM relatum.group_states WHERE state = 'done'"

MEMBER = Path(__file__).with_name("_group_member.py")


@cache
def mixed(part: int) -> list[Plain]:
    first, *others = range(MIXED * part + 1, MIXED * part + 1 + MIXED)
    incomplete = [of_group(first, 1), of_group(first, 3), of_group(first, SIZE, last=True)]
    return shuffled(incomplete + [message for number in others for message in whole_group(number, SIZE)], part)


def test_whatever_fails_each_complete_group_is_done_once(harm: Harm, tmp_path: Path) -> None:
    """Members and their recorder are killed, frozen and cut off: those that are left do all that is to be done."""
    stream = unique_name("groups")
    relatum = Relatum(harm.broker_url, harm.stream_url, harm.database_url)
    files = (tmp_path / f"member-{number}" for number in count())
    words = ["record", stream, "--holder", "recorder"]

    def message(number: int) -> tuple[str, BasicProperties]:
        part, at = divmod(number - 1, MIXED * SIZE - 1)
        body, headers = mixed(part)[at]
        return stream, BasicProperties(headers=headers, message_id=body.decode())

    def start(_: int) -> "subprocess.Popen[bytes]":
        urls = (harm.stream_url, harm.database_url)
        return start_logged(tmp_path / "errors", sys.executable, MEMBER, *urls, stream, "billing", next(files))

    def lines(word: str) -> list[list[str]]:
        written = [line.split() for file in tmp_path.glob("member-*") for line in file.read_text().splitlines()]
        return [line for line in written if line[0] == word]

    def works() -> int:
        return int(harm.rows(DONE)[0][0])

    declare_stream(harm.servers.broker_url, stream)
    with as_engine(harm.servers.database_url) as engine:
        record(harm.servers.broker_url, engine, stream, keys=[GROUP_KEY])
    recorder = Party(lambda _: relatum.start(*words, stderr=tmp_path / "recorder.log"), 1)
    with recorder, Party(start, MEMBERS) as members:
        with StubbornLoad(harm.servers.broker_url, message, each_s=120):
            wait_until(lambda: lines("done"), WORKS_S, what="the first groups")
            harm.work(works, [stream], {"member": members, "recorder": recorder}, frozen_s=2.5 * LEASE_S)
        in_stream: defaultdict[str, set[int]] = defaultdict(set)
        for each in read_stream(harm.servers.broker_url, stream):
            in_stream[each.headers["group_id"]].add(each.headers["group_sequence"])
        complete = {group for group, numbers in in_stream.items() if numbers == set(range(1, SIZE + 1))}
        states = dict.fromkeys(in_stream, "open") | dict.fromkeys(complete, "done")
        wait_until(lambda: dict(harm.rows(STATES)) == states, WORKS_S, what="all is done", every_s=0.5)
        assert [process.poll() for process in members.processes] == [None] * MEMBERS, (tmp_path / "errors").read_text()
    given = Counter(line[1] for line in lines("given"))
    done = Counter(line[1] for line in lines("done"))
    assert set(given) == complete, "each complete group at least once, and no incomplete one"
    whole = {" ".join(f"{int(group, 16)}-{number}" for number in range(1, SIZE + 1)) for group in complete}
    assert {" ".join(line[2:]) for line in lines("given")} == whole, "whole and in order, each time"
    assert max(done.values()) == 1
    # Fewer if a member died, or the answer was lost, between an acknowledgement and the line that reports it.
    assert len(complete) - harm.done.total() * MEMBERS <= len(done) <= len(complete)
    assert_no_traceback(tmp_path / "errors")
    print(f"{len(complete)} complete groups of {len(in_stream)}, {given.total()} times given")
