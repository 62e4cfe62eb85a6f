"""Members of a consumer killed under load: each complete group is given, and acknowledged once; incomplete ones never.

What is compared is what the members wrote down themselves, line by line, with what a bare pika publisher sent.
"""

import random
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from pika import BasicProperties

from relatum.membership import GROUP_KEY
from tests.acceptance._party import Party
from tests.support import wait_until
from tests.support.groups import Plain, of_group, shuffled, whole_group
from tests.support.place import Place
from tests.support.publishing import StubbornLoad

MEMBERS = 3
SIZE = 4
MIXED = 10
"""Groups whose messages lie mixed; one of them never gets all of its messages."""

STATES = "SELECT group_id, state FROM relatum.group_states"

MEMBER = Path(__file__).with_name("_group_member.py")


@cache
def mixed(part: int) -> list[Plain]:
    """The messages of some groups, mixed with one another."""
    first, *others = range(MIXED * part + 1, MIXED * part + 1 + MIXED)
    incomplete = [of_group(first, 1), of_group(first, 3), of_group(first, SIZE, last=True)]
    return shuffled(incomplete + [message for number in others for message in whole_group(number, SIZE)], part)


def headers_of(number: int) -> dict[str, Any]:
    """The headers of the message of a number."""
    part, place = divmod(number - 1, MIXED * SIZE - 1)
    return mixed(part)[place][1]


def test_members_killed_at_random_moments_lose_and_double_nothing(
    place: Place, kills: int, chance: random.Random, tmp_path: Path
) -> None:
    """SIGKILL at random moments while groups come; the members that are left do all that is to be done."""
    arguments = [place.amqp, place.database, place.stream, "billing"]
    files = (tmp_path / f"member-{number}" for number in count())

    def message(number: int) -> tuple[str, BasicProperties]:
        return place.stream, BasicProperties(headers=headers_of(number))

    def start(_: int) -> "subprocess.Popen[bytes]":
        with (tmp_path / "errors").open("ab") as errors:
            return subprocess.Popen([sys.executable, MEMBER, *arguments, next(files)], stderr=errors)

    def lines(word: str) -> list[list[str]]:
        """What they wrote down."""
        written = [line.split() for file in tmp_path.glob("member-*") for line in file.read_text().splitlines()]
        return [line for line in written if line[0] == word]

    with place.recording(keys=[GROUP_KEY]), Party(start, MEMBERS) as members:
        with StubbornLoad(place.amqp, message, each_s=240) as load:
            for _ in range(kills):
                before = len(lines("done"))
                wait_until(lambda before=before: len(lines("done")) > before, what="they work")
                time.sleep(chance.random() * 0.2)  # Not a wait for a condition: the moment of death is the test.
                members.kill_any(chance)
            wait_until(lambda: load.published > 500, what="groups enough")
        place.wait_recorded()
        sent = Counter(headers_of(number + 1)["group_id"] for number in range(load.published))
        complete = {group for group, messages in sent.items() if messages == SIZE}
        states = dict.fromkeys(sent, "open") | dict.fromkeys(complete, "done")
        wait_until(lambda: dict(place.sql(STATES)) == states, what="all is done", every_s=0.2)
        # A member killed between its acknowledgement and the line that says so leaves one line less.
        wait_until(lambda: len(lines("done")) >= len(complete) - kills, what="the last lines")
        errors = (tmp_path / "errors").read_text()
        assert [process.poll() for process in members.processes] == [None] * MEMBERS, errors
    given = Counter(line[1] for line in lines("given"))
    done = Counter(line[1] for line in lines("done"))
    assert set(given) == complete, "each complete group at least once, and no incomplete one"
    assert {line[2] for line in lines("given")} == {str(SIZE)}, "whole, each time"
    assert max(done.values()) == 1
    assert len(complete) - kills <= len(done) <= len(complete)
