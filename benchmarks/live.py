"""The live view: how long after its publish a message is told to one who looks and to fifty, and whether that grows."""

import contextlib
import multiprocessing
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psycopg

from benchmarks._context import Context
from benchmarks._recorder import recorder
from benchmarks._results import Row
from benchmarks._timing import median, percentile
from benchmarks.lag import RATE, publish_steadily, wait_opened
from relatum.reading import StreamReader

GROUP: Final = "live"

SECONDS: Final = 60
WARM_UP_S: Final = 5
"""Seconds at the start that do not count: processes have just begun."""

AT_ONCE: Final = (1, 50)
FORMS: Final = {"rows": "form=rows&most=10", "json": "form=json"}
"""What a browser asks for, and what a script does."""

PER_ADDRESS: Final = 4
"""Live views that one client may have."""

LIMIT_S: Final = 60.0
GROWTH_MAX: Final = 1.5
"""Of the lag of the last third of a run by that of its first: past it, it is taken to fall behind."""

COMMAND: Final = [sys.executable, "-c", "from relatum.command import main; main()", "web", "--port", "0"]

_OFFSET: Final = {"rows": re.compile(rb'strong\\" href=\\"[^"]*/(\d+)\\"'), "json": re.compile(rb'"offset": (\d+)')}
_COUNTS: Final = re.compile(rb'"shown":(\d+),"more":(\d+),"passed":(\d+)}')
_LOST: Final = re.compile(rb'event: lost\ndata: {"count":(\d+)}')


@dataclass(slots=True)
class Told:
    """What one who looks was told: when each shown offset came, how many came altogether, how many were lost."""

    shown: list[tuple[int, float]]
    counted: int = 0
    lost: int = 0
    rest: bytes = b""


def measure(context: Context) -> Iterator[Row]:
    """The rows about the live view."""
    for form, query in FORMS.items():
        for clients in AT_ONCE:
            yield _row(context, form, query, clients)


def _row(context: Context, form: str, query: str, clients: int) -> Row:
    seconds = WARM_UP_S + context.rounds(SECONDS)
    count = RATE * seconds
    stream, database = context.empty_stream(f"live-{form}-{clients}"), context.new_database()
    context.say(f"publishing {RATE:,} messages a second for {seconds} s while {clients} look ({form})")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    publisher = multiprocessing.get_context("spawn").Process(
        target=publish_steadily, args=(context.broker_url, stream, count, sender)
    )
    with (
        psycopg.connect(database, autocommit=True) as connection,
        recorder(context.broker_url, context.stream_url, database, stream),
        _page(context, database) as (url, pid),
    ):
        wait_opened(connection, stream)
        told_receiver, told_sender = multiprocessing.Pipe(duplex=False)
        looking = multiprocessing.get_context("spawn").Process(
            target=_look, args=(url, f"stream={stream}&{query}", form, clients, count, told_sender)
        )
        looking.start()
        assert told_receiver.recv() == "looking"
        cpu = _cpu_s(pid)
        publisher.start()
        published = receiver.recv()
        publisher.join()
        told: list[Told] = told_receiver.recv()
        cpu = _cpu_s(pid) - cpu
        looking.join()
    with StreamReader.open(context.address) as reader:
        number_of = {message.offset: int(message.body) for message in reader.iterate(stream)}
    context.drop_database(database)
    return _figures(form, clients, told, published, number_of, cpu)


def _figures(
    form: str, clients: int, told: list[Told], published: list[float], number_of: dict[int, int], cpu: float
) -> Row:
    count = len(published)
    begin = published[0] + WARM_UP_S
    lags = sorted(
        (published[number_of[offset]], moment - published[number_of[offset]])
        for each in told
        for offset, moment in each.shown
        if published[number_of[offset]] >= begin
    )
    values = [lag for _, lag in lags]
    third = len(values) // 3
    first, last = median(values[:third]), median(values[-third:])
    for each in told:
        assert each.counted + each.lost == count, f"{each.counted:,} told of and {each.lost:,} lost, of {count:,}"
        assert len({offset for offset, _ in each.shown}) == len(each.shown), "each is shown once"
    lost = sum(each.lost for each in told)
    return Row(
        GROUP,
        f"from publish to told, {clients} look{'s' if clients == 1 else ''} ({form})",
        f"median {median(values):.2f} s, p99 {percentile(values, 0.99):.2f} s",
        aim=f"the last third's median ≤ {GROWTH_MAX:g} of the first's, none lost",
        is_met=last <= GROWTH_MAX * first and not lost,
        note=f"{first:.2f} s in the first third, {last:.2f} s in the last; {lost:,} lost",
        figures={
            "median_s": median(values),
            "p99_s": percentile(values, 0.99),
            "max_s": max(values),
            "first_third_s": first,
            "last_third_s": last,
            "lost": lost,
            "shown_share": sum(len(each.shown) for each in told) / count / clients,
            "published_per_s": count / (published[-1] - published[0]),
            "page_processors": cpu / (published[-1] - published[0]),
        },
    )


# --- the page -----------------------------------------------------------------------------------------------


@contextmanager
def _page(context: Context, database: str) -> Iterator[tuple[str, int]]:
    """`relatum web` in a process of its own: its address, and the process."""
    environment = os.environ | {
        "RELATUM_BROKER_URL": context.broker_url,
        "RELATUM_STREAM_URL": context.stream_url,
        "RELATUM_DATABASE_URL": database,
    }
    process = subprocess.Popen(COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().partition("=")[2].strip(), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        process.stdout.close()


def _cpu_s(pid: int) -> float:
    """Seconds of the processors that a process took so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- those who look -----------------------------------------------------------------------------------------


def _look(url: str, query: str, form: str, clients: int, count: int, sender: Connection) -> None:
    """In a process of its own: all who look, until each was told of all."""
    address = urlsplit(url)
    selector = selectors.DefaultSelector()
    told = [Told([]) for _ in range(clients)]
    with contextlib.ExitStack() as stack:
        for number, each in enumerate(told):
            # Each few by an address of their own, as other machines have: a client may have four.
            own = (f"127.0.1.{1 + number // PER_ADDRESS}", 0)
            one = stack.enter_context(socket.create_connection((address.hostname, address.port), LIMIT_S, own))
            one.sendall(f"GET /api/live/events?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            while b'"live"' not in each.rest:
                each.rest += one.recv(1 << 16)
                assert each.rest.startswith(b"HTTP/1.1 200"), each.rest
            each.rest = b""
            one.setblocking(False)
            selector.register(one, selectors.EVENT_READ, each)
        sender.send("looking")
        limit = time.monotonic() + count / RATE + LIMIT_S
        while any(each.counted + each.lost < count for each in told) and time.monotonic() < limit:
            for key, _ in selector.select(1.0):
                _read(key.fileobj.recv(1 << 20), key.data, _OFFSET[form])
    sender.send(told)


def _read(data: bytes, told: Told, offsets: re.Pattern[bytes]) -> None:
    """Take what came: events that are whole."""
    now = time.monotonic()
    whole, end, rest = (told.rest + data).rpartition(b"\n\n")
    told.rest = rest
    if not end:
        return
    told.shown += [(int(offset), now) for offset in offsets.findall(whole)]
    told.counted += sum(int(number) for counts in _COUNTS.findall(whole) for number in counts)
    told.lost += sum(map(int, _LOST.findall(whole)))
