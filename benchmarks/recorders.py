"""One recorder of very many streams: its cost at rest, its lag under load, and its start-up time."""

import bisect
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import pika
import psycopg

from benchmarks import _streams as streams
from benchmarks._context import Context
from benchmarks._recorder import peak_rss_bytes, recorder
from benchmarks._results import Row
from benchmarks._timing import median, milliseconds, percentile

GROUP: Final = "recorders"

STREAMS: Final = 1_000
START_STREAMS: Final = 2_000
QUICK_STREAMS: Final = 300

RATE: Final = 10
"""Messages a second in each stream."""

LOWER_RATES: Final = (8, 6, 5, 4, 3, 2, 1)
"""Lower rates to try in turn if the lag was over the aim."""

HOT: Final = 4
"""One stream in 4 is hot; the hot streams have most of the messages."""

SECONDS: Final = 20
REST_S: Final = 10
SAMPLED: Final = 20
"""Number of streams whose lag is measured."""

POLL_S: Final = 0.005
LIMIT_S: Final = 180.0

LAG_AIM_S: Final = 0.25
SUSTAINED: Final = 0.98
"""Share of the requested rate that must have been published for a measurement to count."""

RSS_AIM_BYTES: Final = 300_000_000
START_AIM_S: Final = 30.0
IDLE_AIM: Final = 2.0
AIMS: Final = {"broker": 8, "database": 4, "threads": 12}

OPENED: Final = "SELECT count(*) FROM relatum.coverage WHERE is_tail"
ENDS: Final = (
    "SELECT name, to_offset FROM relatum.coverage JOIN relatum.streams USING (stream_id) "
    "WHERE is_tail AND name = ANY(%s)"
)
TRANSACTIONS: Final = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"


@dataclass(frozen=True, slots=True)
class Cost:
    """The resources of a recorder's process.

    Attributes:
        threads: Number of threads.
        broker: Number of connections to the broker.
        database: Number of connections to PostgreSQL.
    """

    threads: int
    broker: int
    database: int


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about many streams."""
    count = QUICK_STREAMS if context.is_quick else STREAMS
    most = 2 * count if context.is_quick else START_STREAMS
    context.say(f"declaring {most:,} streams")
    names = [context.empty_stream(f"many-{n}") for n in range(most)]
    yield from _start(context, names)
    yield from _under_load(context, names[:count])


def _start(context: Context, names: Sequence[str]) -> Iterator[Row]:
    context.say(f"starting a recorder of {len(names):,} streams")
    database = context.new_database()
    with psycopg.connect(database, autocommit=True) as connection:
        begun = time.perf_counter()
        with recorder(context.broker_url, context.stream_url, database, *names):
            _wait_opened(connection, len(names))
            first_s = time.perf_counter() - begun
        begun = time.perf_counter()
        connection.execute("UPDATE relatum.streams SET state = 'missing'")
        with recorder(context.broker_url, context.stream_url, database, *names):
            _wait_for(connection, "SELECT count(*) FROM relatum.streams WHERE state = 'recording'", len(names))
            again_s = time.perf_counter() - begun
    context.drop_database(database)
    yield Row(
        GROUP,
        f"{len(names):,} streams: from the start of the process until all are opened",
        f"{first_s:.1f} s the first time, {again_s:.1f} s again",
        aim=f"≤ {START_AIM_S:g} s",
        is_met=max(first_s, again_s) <= START_AIM_S,
        figures={"first_s": first_s, "again_s": again_s},
    )


def _under_load(context: Context, names: Sequence[str]) -> Iterator[Row]:
    database = context.new_database()
    with (
        psycopg.connect(database, autocommit=True) as connection,
        recorder(context.broker_url, context.stream_url, database, *names) as pid,
    ):
        _wait_opened(connection, len(names))
        context.say(f"resting beside {len(names):,} idle streams")
        yield _at_rest(connection, pid, len(names))
        most = 0.0
        for is_hot in (False, True):
            lags, rate = _lags(context, connection, names, RATE, is_hot=is_hot)
            yield _lag_row(lags, rate, len(names), pid, is_hot=is_hot)
            if not is_hot and _is_sustained(lags, rate, RATE * len(names)):
                most = rate
        for each_rate in LOWER_RATES:
            if not most:
                lags, rate = _lags(context, connection, names, each_rate, is_hot=False)
                most = rate if _is_sustained(lags, rate, each_rate * len(names)) else 0.0
        yield Row(
            GROUP,
            f"the greatest rate that is recorded within {LAG_AIM_S * 1e3:.0f} ms (p99), {len(names):,} streams",
            f"{most:,.0f} messages/s",
            aim=f"≥ {RATE * len(names):,} messages/s",
            is_met=most >= SUSTAINED * RATE * len(names),
            note="Broker, PostgreSQL and publisher share the machine.",
            figures={"published_per_s": most},
        )
    context.drop_database(database)


def _is_sustained(lags: list[float], rate: float, asked: float) -> bool:
    return percentile(lags, 0.99) <= LAG_AIM_S and rate >= SUSTAINED * asked


def _at_rest(connection: "psycopg.Connection[tuple[int]]", pid: int, count: int) -> Row:
    time.sleep(REST_S)
    before = _number(connection, TRANSACTIONS)
    begun = time.perf_counter()
    time.sleep(REST_S)
    # One transaction was the previous query itself.
    rate = (_number(connection, TRANSACTIONS) - before - 1) / (time.perf_counter() - begun)
    cost = cost_of(pid, connection.info.port)
    limits = ", ".join(f"≤ {aim} {name}" for name, aim in AIMS.items())
    return Row(
        GROUP,
        f"{count:,} idle streams, one recorder",
        f"{rate:.1f} transactions/s, {cost.broker} connections to the broker, {cost.database} to PostgreSQL, "
        f"{cost.threads} threads",
        aim=f"≤ {IDLE_AIM:g} transactions/s, {limits}",
        is_met=rate <= IDLE_AIM and all(getattr(cost, name) <= aim for name, aim in AIMS.items()),
        figures={"transactions_per_s": rate, **{name: getattr(cost, name) for name in AIMS}},
    )


def _lag_row(lags: list[float], rate: float, count: int, pid: int, *, is_hot: bool) -> Row:
    middle, late, rss = median(lags), percentile(lags, 0.99), peak_rss_bytes(pid)
    which = f", nine tenths of them to one stream in {HOT}" if is_hot else ""
    return Row(
        GROUP,
        f"from publish to recorded, {count:,} streams, {rate:,.0f} messages/s in all{which}",
        f"median {milliseconds(middle)}, p99 {milliseconds(late)}, {rss / 1e6:,.0f} MB",
        aim=f"p99 ≤ {LAG_AIM_S * 1e3:.0f} ms, ≤ {RSS_AIM_BYTES / 1e6:,.0f} MB",
        is_met=late <= LAG_AIM_S and rss <= RSS_AIM_BYTES,
        note=f"Of {SAMPLED} streams, hot and cold; broker, PostgreSQL and publisher share the machine.",
        figures={"median_s": middle, "p99_s": late, "max_s": max(lags), "rss_bytes": rss, "published_per_s": rate},
    )


def _lags(
    context: Context,
    connection: "psycopg.Connection[tuple[int]]",
    names: Sequence[str],
    each_rate: int,
    *,
    is_hot: bool,
) -> tuple[list[float], float]:
    """Return the seconds from publish to record in the sampled streams, and the messages published a second."""
    rate = each_rate * len(names)
    context.say(f"publishing {rate:,} messages a second to {len(names):,} streams")
    sampled = [names[at * len(names) // SAMPLED] for at in range(SAMPLED)]
    begins = _ends(connection, sampled)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    total = rate * context.rounds(SECONDS)
    publisher = multiprocessing.get_context("spawn").Process(
        target=_publish, args=(context.broker_url, list(names), rate, total, is_hot, sampled, sender)
    )
    publisher.start()
    seen: dict[str, list[tuple[int, float]]] = {name: [] for name in sampled}
    while not receiver.poll():
        _watch(connection, seen)
        time.sleep(POLL_S)
    published, achieved = receiver.recv()
    publisher.join()
    limit = time.monotonic() + LIMIT_S
    while any(_last(seen[name], begins[name]) < begins[name] + len(published[name]) for name in sampled):
        _watch(connection, seen)
        assert time.monotonic() < limit, "what was published is not recorded"
        time.sleep(POLL_S)
    lags = []
    for name in sampled:
        ends = [end for end, _ in seen[name]]
        for number, moment in enumerate(published[name]):
            lags.append(seen[name][bisect.bisect_right(ends, begins[name] + number)][1] - moment)
    return lags, achieved


def _last(seen: list[tuple[int, float]], begin: int) -> int:
    return seen[-1][0] if seen else begin


def _watch(connection: "psycopg.Connection[tuple[int]]", seen: dict[str, list[tuple[int, float]]]) -> None:
    ends = _ends(connection, list(seen))
    now = time.monotonic()
    for name, end in ends.items():
        if not seen[name] or seen[name][-1][0] != end:
            seen[name].append((end, now))


def _ends(connection: "psycopg.Connection[tuple[int]]", names: list[str]) -> dict[str, int]:
    return {str(name): int(end) for name, end in connection.execute(ENDS, [names], prepare=True)}


def _publish(
    broker_url: str, names: list[str], rate: int, total: int, is_hot: bool, sampled: list[str], sender: Connection
) -> None:
    """Publish at a steady rate, in a process of its own; send back the publish times of the sampled streams."""
    chance = random.Random(1)
    hot, moments = names[::HOT], {name: [] for name in sampled}
    order = chance.sample(names, len(names))
    with streams.connected(broker_url) as connection:
        channel = connection.channel()
        begun = time.perf_counter()
        for number in range(total):
            due = begun + number / rate
            if number % 50 == 0:
                time.sleep(max(0.0, due - time.perf_counter()))
            stream = order[number % len(order)]
            if is_hot and number % 10:
                stream = chance.choice(hot)
            headers = {"order_id": streams.order_id(number), "host": streams.host(number)}
            if stream in moments:
                moments[stream].append(time.monotonic())
            channel.basic_publish("", stream, b"", pika.BasicProperties(headers=headers))
        achieved = total / (time.perf_counter() - begun)
    sender.send((moments, achieved))


def _wait_opened(connection: "psycopg.Connection[tuple[int]]", count: int) -> None:
    _wait_for(connection, OPENED, count)


def _wait_for(connection: "psycopg.Connection[tuple[int]]", query: str, count: int) -> None:
    limit = time.monotonic() + LIMIT_S
    while (found := _number(connection, query)) < count:
        assert time.monotonic() < limit, f"{found} of {count} streams are opened"
        time.sleep(0.1)


def _number(connection: "psycopg.Connection[tuple[int]]", query: str) -> int:
    row = connection.execute(query, prepare=True).fetchone()
    assert row is not None
    return row[0]


def cost_of(pid: int, database_port: int) -> Cost:
    """Return a process's threads and connections; zeros if the system does not report them."""
    process = Path(f"/proc/{pid}")
    if not process.exists():
        return Cost(0, 0, 0)
    inodes = {str(link.readlink()) for link in (process / "fd").iterdir() if link.is_symlink()}
    ports = []
    for table in ("tcp", "tcp6"):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "01" and f"socket:[{words[9]}]" in inodes:
                ports.append(int(words[2].rpartition(":")[2], 16))
    database = ports.count(database_port)
    return Cost(len(list((process / "task").iterdir())), len(ports) - database, database)
