"""`relatum demo`: publishes, records, finds and checks messages: flights, planes and weather of New York in 2013."""

import json
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import typer
from rich.text import Text

from relatum.errors import ConfigurationError
from relatum.local import LocalServers, reader_url
from relatum.reading import Broker, Message, StreamReader
from relatum.recording import Recorder
from relatum_cli.demo_flights import REPEATS, Asking, Data, Servers, TimedAnswer, load, publish_and_record
from relatum_cli.exits import ExitCode
from relatum_cli.options import Json, Port, ServerOptions, option, print_exports
from relatum_cli.servers import serve
from relatum_cli.show import console, errors, note, print_json, print_table
from relatum_consumer import Relations
from relatum_consumer.web.options import WebOptions, of_extra
from relatum_migrations import upgrade

TIMEOUT_S: Final = 60.0
"""Time limit of a lookup, also on the page, in seconds: "Missing" reads 46,000 messages for the whole year, and a slow
laptop reads 3,000 per second."""

DIFFERENCES_SHOWN: Final = 10

DIRECTORY: Final = "The directory for private servers' data; by default a temporary one, deleted at the end."


def demo(
    *,
    flights: int = option(5_000, "Number of flights to publish, from the beginning of 2013.", min=500, max=12_208),
    all_flights: bool = option(False, "Publish all 336,776 flights of the year; needs the extra `demo-all`.", "--all"),
    web: bool = option(False, "Then serve the page, until Ctrl-C; needs the extra `web`.", "--web"),
    port: Port = 8440,
    checked: int = option(200, "Number of further questions whose answers are checked.", min=1),
    seed: int = option(2013, "The seed that selects random flights for these questions."),
    directory: Path | None = option(None, DIRECTORY, "--directory", "-d"),
    prefix: str = option("", "A prefix for the stream names flights, planes and weather."),
    servers: ServerOptions,
    as_json: Json = False,
) -> None:
    """Checks the answers against the data, and exits with code 7 if one differs. Runs on private servers, and stops
    them; or on yours with --broker and --database, where streams and rows stay. `--json` prints one document.
    """
    if web:
        _check_page(port)
    began = time.perf_counter()
    data = load(whole_year=True) if all_flights else load(flights)
    with _running(servers, directory, prefix) as running:
        result = _run(running, data, checked, seed, quiet=as_json)
        result["seconds"] = time.perf_counter() - began
        if as_json:
            print_json(result)
        else:
            console.print(_TOUR if web else _STAYS if servers.broker_url else _NEXT)
        if web:
            is_private = not (servers.broker_url or servers.database)
            with redirect_stdout(sys.stderr) if as_json else nullcontext():
                _serve(running, port, result["flight"], is_private=is_private)
    if result["differences"]:
        raise typer.Exit(ExitCode.DIFFERENT)


_NEXT: Final = """\
Next        relatum demo --web   the same messages in a browser (extra `web`)
            relatum up           both servers, for your own programs
            README.md            a publisher and a consumer, a dozen lines each"""

_STAYS: Final = """\
Next        The streams and their rows stay.
            relatum find tailnum N14228   a plane and its flights
            relatum web                   the same in a browser (extra `web`)"""

_TOUR: Final = """\
Next        Open the URL below: it shows this flight. Its plane, its weather
            and the plane's other flights are one click away."""


@contextmanager
def _running(given: ServerOptions, directory: Path | None, prefix: str) -> Iterator[Servers]:
    """Yield the given servers, or start private servers and yield them."""
    if given.broker_url or given.database:
        yield Servers(given.broker, given.database_url, prefix)
        return
    with TemporaryDirectory(prefix="relatum-demo-") as temporary, ExitStack() as stack:
        # Temporary data need not survive a power loss.
        local = LocalServers(directory or temporary, durable=directory is not None)
        with _activity("Starting a private RabbitMQ and a private PostgreSQL"):
            stack.enter_context(local)
        broker = Broker(local.broker_url, stream_url=local.stream_url)
        yield Servers(broker, local.database_url, prefix, directory)


@contextmanager
def _activity(text: str) -> Iterator[Callable[[str], None]]:
    """Print an activity on stderr; a terminal shows it until it ends. Yield a function that adds details."""
    if not errors.is_terminal:
        note(f"{text} …")
        yield lambda _: None
        return
    with errors.status(f"{text} …") as status:
        yield lambda more: status.update(f"{text} … {more}")


def _run(servers: Servers, data: Data, checked: int, seed: int, *, quiet: bool) -> dict[str, Any]:
    """Publish, ask and check; print the results unless quiet."""
    upgrade(servers.database)
    messages = sum(map(len, data.values()))
    with _activity(f"Publishing {messages:,} messages, and recording them") as add:
        publish_s, recorded_s = publish_and_record(servers, data, add)
    with (
        Relations(servers.broker, servers.database, timeout_s=TIMEOUT_S) as relations,
        StreamReader.open(servers.broker, timeout_s=TIMEOUT_S) as reader,
    ):
        with _activity("Asking five questions, and scanning the streams for the same answers"):
            asking = Asking(servers, data, relations, reader)
            row = asking.choose()
            flight, timed = asking.flight(row), list(asking.timed(row))
        with _activity(f"Checking {checked:,} more answers"):
            checks, differences = asking.check(checked, seed), asking.differences
    if not quiet:
        _print_published(data, publish_s, recorded_s)
        _print_answers(flight, timed)
        _say("Checked", f"{checks:,} more answers: {len(differences) or 'no'} differences from what was published.\n")
        if differences:
            print_table(differences[:DIFFERENCES_SHOWN], ("message", "question", "the rows say", "answered", "by"))
    return {
        "messages": messages,
        "publish_s": publish_s,
        "recorded_after_s": recorded_s,
        "flight": str(flight.id),
        "questions": [{name: value for name, value in each._asdict().items() if name != "text"} for each in timed],
        "checked": checks,
        "differences": [each._asdict() for each in differences],
    }


def _print_published(data: Data, publish_s: float, recorded_s: float) -> None:
    planes, reports, flights = (f"{len(rows):,}" for rows in data.values())
    _say(
        "Published",
        f"{flights} flights that left New York in 2013, {planes} planes and {reports} weather reports, to three "
        f"RabbitMQ streams in {publish_s:.1f} s. Headers say what a message is about: tailnum, origin, time_hour.",
    )
    _say("Recorded", f"{recorded_s:.2f} s later: PostgreSQL knows where each value is.\n")


def _print_answers(flight: Message, timed: Sequence[TimedAnswer]) -> None:
    row = json.loads(flight.body)
    _say(
        "Asked",
        f"What belongs to flight {row['carrier']} {row['flight']} from {row['origin']} to {row['dest']}, tail number "
        f"{row['tailnum']}, which left on {flight.time:%d %b at %H:%M} UTC (message {flight.id})?",
    )
    console.print(f"{'Relatum':>69}{'scanning':>10}", style="dim")
    for each in timed:
        times = f"{_milliseconds(each.relatum_ms):>10}{_milliseconds(each.scan_ms):>10}"
        console.print(f"{each.question:28}{each.text:31}{times}")
    _say("", f"Relatum: an index and a short read (median of {REPEATS}). Scanning: all.\n")


def _say(label: str, text: str) -> None:
    for line in textwrap.wrap(text, 68):
        console.print(Text.assemble((f"{label:12}", "bold"), line))
        label = ""
    if text.endswith("\n"):
        console.print()


def _milliseconds(number: float) -> str:
    return f"{number:,.1f} ms" if number < 100 else f"{number:,.0f} ms"


def _check_page(port: int) -> None:
    """Check, before the demo starts, that the page can be served."""
    with of_extra():
        from relatum_consumer.web import WebServer  # noqa: F401
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise ConfigurationError(
            f"the page cannot use port {port}: {error.strerror}. Choose another port with --port; 0: a free port"
        ) from error


def _serve(running: Servers, port: int, flight: str, *, is_private: bool) -> None:
    """Serve the page while a recorder runs. On private servers, the page's database user can only read."""
    database = running.database
    if is_private:
        print_exports(running.broker, database)
        database = reader_url(database)
    stop = threading.Event()
    recorder = Recorder(running.broker, running.database, running.streams)
    thread = threading.Thread(target=recorder.run, args=(stop,), name="relatum-demo-recorder", daemon=True)
    thread.start()
    try:
        stream, _, offset = flight.rpartition("@")
        options = WebOptions(running.broker, database, port=port, timeout_s=TIMEOUT_S)
        serve(options, begin={"stream": stream, "offset": offset})
    finally:
        stop.set()
        thread.join()
