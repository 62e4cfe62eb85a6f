"""The command. pandas and the data are imported only when it runs: they come with the extra `demo`."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from relatum.errors import ConfigurationError
from relatum.terminal import ExitCode, JsonOption, ServerOptions, console, errors, print_exports, print_json, spread
from relatum_migrations import upgrade

if TYPE_CHECKING:
    from relatum_consumer import Relations
    from relatum_consumer.demo._asking import Difference, Timed
    from relatum_consumer.demo._data import Dataset
    from relatum_consumer.demo._publish import Servers

TIMEOUT_S: Final = 60.0
"""Seconds for one question, of the demo and of its page: "Missing, over all time" reads 46,000 messages, and a slow
laptop reads 3,000 a second."""

LINE_S: Final = 5.0
"""Seconds between two lines of progress where stderr is no terminal."""


@spread
def demo(
    flights: Annotated[
        int, typer.Option(help="How many flights are published, the earliest of 2013.", min=500, max=336_776)
    ] = 20_000,
    all_flights: Annotated[bool, typer.Option("--all", help="Publish all 336,776 flights.")] = False,
    web: Annotated[
        bool,
        typer.Option(
            "--web", help="Then serve the page on them, until Ctrl-C: flights, planes and weather to go through."
        ),
    ] = False,
    port: Annotated[int, typer.Option(help="The page's port; 0 for a free one.", min=0, max=65_535)] = 8440,
    checked: Annotated[int, typer.Option(help="About how many random flights the answers are checked.", min=1)] = 200,
    seed: Annotated[int, typer.Option(help="Which random flights.")] = 2013,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            "-d",
            show_default=False,
            help="Where private servers keep their data; a temporary one, removed at the end, by default.",
        ),
    ] = None,
    prefix: Annotated[str, typer.Option(help="Put before the streams' names flights, planes and weather.")] = "",
    *,
    servers: ServerOptions,
    as_json: JsonOption = False,
) -> None:
    """Publish, record and find real messages: flights, their planes and the weather. Checks its own answers.

    Runs on private servers that end with it, or on yours with --broker and --database; there the streams and their
    rows stay. Ends with code 7 where an answer differs from the data frames. `--json` prints one document.
    """
    if web:
        _check_page(port)
    with ExitStack() as stack:
        console.quiet, before = as_json, console.quiet
        stack.callback(setattr, console, "quiet", before)
        began = time.perf_counter()
        _say("Loading the flights …")
        data = _load(None if all_flights else flights)
        running = stack.enter_context(_running(servers, directory, prefix))
        result = _run(running, data, checked, seed)
        result["seconds"] = time.perf_counter() - began
        if not as_json:
            _conclude(result, stays=servers.broker is not None, shown=web)
        if as_json:
            print_json(result)
        if web:
            console.print(_TOUR)
            _show(running, port, result["flight"], is_private=not (servers.broker or servers.database))
    if result["differences"]:
        raise typer.Exit(ExitCode.DIFFERENT)


_TOUR = """
Open this flight by the address below. Beside it are its plane (tailnum, in other streams), its weather (airport_hour)
and the plane's earlier flights, each one click away. The first page has the newest messages, and searches by keys; the
page "Missing", over all time, has the hours without a departure."""


def _load(flights: int | None) -> "Dataset":
    try:
        from relatum_consumer.demo import _data

        return _data.load(flights)
    except ImportError as error:  # pandas, at once; the flights, when they are loaded
        raise ConfigurationError(f"the demo needs pip install 'relatum[demo,local]': {error}") from error


@contextmanager
def _running(given: ServerOptions, directory: Path | None, prefix: str) -> "Iterator[Servers]":
    """The servers to run on: those given, or private ones."""
    from relatum_consumer.demo._publish import Servers
    from relatum_consumer.demo._show import heading

    if given.broker or given.database:
        yield Servers(given.broker_url, given.stream_url, given.database_url, prefix)
        return
    with ExitStack() as stack:
        from relatum.local import LocalServers

        began = time.perf_counter()
        where = directory or Path(stack.enter_context(TemporaryDirectory(prefix="relatum-demo-")))
        _say(f"Starting a private RabbitMQ and a private PostgreSQL in {where} …")
        # What is thrown away at the end need not survive a power loss.
        local = stack.enter_context(LocalServers(where, durable=directory is not None))
        heading(f"1. A private RabbitMQ and a private PostgreSQL run ({time.perf_counter() - began:.1f} s).")
        yield Servers(local.broker_url, local.stream_url, local.database_url, prefix, directory)


def _run(servers: "Servers", data: "Dataset", checked: int, seed: int) -> dict[str, Any]:
    from relatum.reading import StreamReader
    from relatum.store import as_engine
    from relatum_consumer import Relations
    from relatum_consumer.demo._asking import Demonstration

    upgrade(servers.database)
    with as_engine(servers.database) as engine:
        result = _publish(servers, engine, data)
    broker, database, stream_url = servers.broker, servers.database, servers.stream_url
    with (
        Relations(broker=broker, database=database, stream_url=stream_url, timeout_s=TIMEOUT_S) as relations,
        StreamReader.open(servers.address, timeout_s=TIMEOUT_S) as reader,
    ):
        _say("Reading where each flight lies …")
        asking = Demonstration(servers, data, relations, reader)
        return {**result, **_ask(asking, lambda: _missing(servers, data, relations), checked, seed)}


def _publish(servers: "Servers", engine: Any, data: "Dataset") -> dict[str, Any]:
    from relatum_consumer.demo._publish import publish_and_record, totals
    from relatum_consumer.demo._show import heading

    counts = dict(totals(data))
    messages = sum(counts.values())
    _say(f"Publishing {messages:,} messages, and recording them …")
    with _progress(counts) as advance:
        published_s, recorded_s = publish_and_record(servers, engine, data, advance)
    heading(f"2. {messages:,} messages are published ({published_s:.1f} s), and recorded {recorded_s:.2f} s later.")
    return {"messages": messages, "publish_s": published_s, "recorded_after_s": recorded_s}


def _say(text: str) -> None:
    """Tell, on stderr, what is done now: it may take minutes."""
    errors.print(text, soft_wrap=True)


@contextmanager
def _progress(totals: Mapping[str, int]) -> Iterator[Callable[[str, int], None]]:
    """A function that is told what was done, and how many more: bars on a terminal, a line now and then elsewhere."""
    if errors.is_terminal:
        columns = (TextColumn("   {task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=errors, disable=console.quiet) as bars:
            tasks = {name: bars.add_task(name, total=total) for name, total in totals.items()}
            yield lambda name, count: bars.advance(tasks[name], count)
        return
    done: Counter[str] = Counter()
    lock, said = threading.Lock(), time.monotonic()

    def advance(name: str, count: int) -> None:
        nonlocal said
        with lock:
            done[name] += count
            if time.monotonic() - said > LINE_S:
                said = time.monotonic()
                _say(f"   {name}: {done[name]:,} of {totals[name]:,}")

    yield advance


def _missing(servers: "Servers", data: "Dataset", relations: "Relations") -> "list[Difference]":
    from relatum_consumer.demo._departures import check_departures, expect_departures
    from relatum_consumer.demo._show import heading

    _say("Asking what is missing …")
    report, differences = check_departures(relations, data, expect_departures(servers))
    heading(
        f"5. What is missing: after {report.missing_count:,} of {report.checked:,} weather reports no flight left in "
        f"the hour they are of, after {report.late_count:,} the first left late: "
        f"{len(differences) or 'no'} differences."
    )
    return differences


def _ask(asking: Any, missing: "Callable[[], list[Difference]]", checked: int, seed: int) -> dict[str, Any]:
    from relatum_consumer.demo._show import describe_flight, heading, print_differences, print_timed

    flight = asking.choose()
    heading("3. One flight, and what belongs to it:")
    console.print(f"   {describe_flight(flight)}")
    _say("Asking each question many times, and scanning the streams for its answer …")
    timed = list(asking.timed(flight))
    print_timed(timed)
    differences = asking.check(flight, timed)
    began = time.perf_counter()
    numbers = asking.numbers(checked, seed)
    _say(f"Asking them of {len(numbers):,} more flights …")
    with _progress({"flights": len(numbers)}) as advance:
        asked, more = asking.check_many(numbers, lambda count: advance("flights", count))
    differences += more
    heading(
        f"4. {asked:,} more questions, compared with the data frames ({time.perf_counter() - began:.1f} s): "
        f"{len(differences) or 'no'} differences."
    )
    differences += missing()
    if differences:
        print_differences(differences)
    return {
        "flight": str(flight.id),
        "questions": [_question(each) for each in timed],
        "checked": asked,
        "differences": [asdict(each) for each in differences],
    }


def _question(each: "Timed") -> dict[str, Any]:
    return {
        "question": each.question.words,
        "by": each.question.how,
        "answer": str(each.answer.id) if each.answer else None,
        "relatum_ms": each.relatum_s * 1e3,
        "scan_ms": each.scan_s * 1e3,
    }


def _check_page(port: int) -> None:
    """See that there will be a page, before anything is done."""
    try:
        from relatum_consumer.web import WebServer  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(f"the page needs pip install 'relatum[web]': {error}") from error
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise ConfigurationError(
            f"the page cannot have port {port}: {error.strerror}. Choose another with --port; 0 is a free one"
        ) from error


def _show(running: "Servers", port: int, flight: str, *, is_private: bool) -> None:
    """Serve the page, with a recorder that takes in what is published meanwhile; on private servers by its own user."""
    from relatum.recording import Recorder
    from relatum_consumer.demo._publish import STREAMS
    from relatum_consumer.web import WebOptions, serve

    database = running.database
    if is_private:
        from relatum.local import reader_url

        print_exports(running.broker, running.stream_url, database)
        database = reader_url(database)
    names = [running.stream(name) for name in STREAMS]
    stop = threading.Event()
    recorder = Recorder(running.broker, running.database, names, stream_url=running.stream_url)
    thread = threading.Thread(target=recorder.run, args=(stop,), name="relatum-demo-recorder", daemon=True)
    thread.start()
    try:
        stream, _, offset = flight.rpartition("@")
        options = WebOptions(running.broker, database, running.stream_url, port=port, timeout_s=TIMEOUT_S)
        serve(options, begin=(stream, int(offset)))
    finally:
        stop.set()
        thread.join()


def _conclude(result: dict[str, Any], *, stays: bool, shown: bool) -> None:
    console.print(
        f"\nWhat was done, in {result['seconds']:.0f} s: the messages went to three RabbitMQ streams with ordinary "
        "headers (tailnum, origin, time_hour, relatum_time). A recorder in the publisher's process read the streams' "
        "tails and wrote down in PostgreSQL which values lie at which offsets. The consumer then went from a message "
        "to its relata by the index, read each at its offset, and checked that it carries the key.",
    )
    if not shown:
        again = "`relatum web`" if stays else "`relatum demo --web`"
        console.print(f"To look at it in a browser, from a flight to its plane and its weather: {again}.")
    if stays:
        console.print("The streams and their rows stay: try `relatum find tailnum N14228`, or `relatum status`.")
