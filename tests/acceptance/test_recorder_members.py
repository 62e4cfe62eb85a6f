"""Several `relatum record` of the same streams: one is frozen and comes back, one is killed; each row is there once."""

import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relatum.recording import verify
from tests.acceptance._command import Relatum
from tests.support import new_streams, wait_until
from tests.support.place import Place

STREAMS = 4
KEY = "order_id"

HOLDERS = """
SELECT lease_holder FROM relatum.streams s JOIN relatum.recorder_members m ON m.holder = s.lease_holder
WHERE m.lease_expires_at >= clock_timestamp()
"""
"""Who has a stream, for each whose lease holds."""


@contextmanager
def member(relatum: Relatum, names: list[str], log: Path) -> "Iterator[subprocess.Popen[str]]":
    """A recorder's process, called by the name of its log."""
    process = relatum.start("record", *names, "--keys", KEY, "--holder", log.stem, stderr=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.communicate(timeout=90)


def test_members_that_are_frozen_or_killed_are_replaced_and_no_row_is_written_twice(
    place: Place, relatum: Relatum, tmp_path: Path
) -> None:
    """SIGSTOP for longer than a lease, SIGCONT, SIGKILL: what is published meanwhile is recorded by the others."""
    published = 0

    def publish() -> None:
        nonlocal published
        for name in names:
            place.put(*[(b"", {KEY: f"o{published + n}"}) for n in range(5)], to=name)
        published += 5

    def share(**expected: int) -> None:
        wait_until(
            lambda: Counter(holder for (holder,) in place.sql(HOLDERS)) == Counter(expected),
            what=f"shares of {expected}",
        )

    def all_recorded() -> None:
        for name in names:
            place.wait_recorded(name)

    with new_streams(place.amqp, STREAMS) as names:
        with member(relatum, names, tmp_path / "a.log") as first, member(relatum, names, tmp_path / "b.log") as second:
            share(a=2, b=2)
            publish()
            all_recorded()
            first.send_signal(signal.SIGSTOP)
            publish()
            share(b=4)
            all_recorded()
            first.send_signal(signal.SIGCONT)
            publish()
            share(a=2, b=2)
            all_recorded()
            second.kill()
            second.wait()
            publish()
            share(a=4)
            all_recorded()
            first.terminate()
            assert first.wait(90) == 0
        for name in names:
            assert [value for _, value, _ in place.rows(name)] == [f"o{n}" for n in range(published)]
        assert verify(place.amqp, place.database, names).ok
