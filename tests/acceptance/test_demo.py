"""The demo: the installed command on real data, and that it would notice a wrong answer."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Final

import httpx
import pytest
import sqlalchemy as sa

from relatum.reading import StreamReader
from relatum.terminal import ExitCode
from relatum_consumer import Relations
from relatum_consumer.demo._asking import Demonstration
from relatum_consumer.demo._data import FLIGHTS, Dataset, load
from relatum_consumer.demo._departures import check_departures, expect_departures
from relatum_consumer.demo._publish import STREAMS, Servers, publish_and_record
from tests.acceptance._command import COMMAND, LIMIT_S, Relatum, run
from tests.support import delete_stream, processes_naming, unique_name, wait_until
from tests.support.web import at

STANDSTILL_S: Final = 11.0
"""Seconds for which RabbitMQ does nothing: more than the 10 that a look-up has by default."""


@pytest.fixture
def prefix(amqp_url: str) -> Iterator[str]:
    """What stands before the names of this test's streams."""
    prefix = unique_name("relatum-demo") + "-"
    yield prefix
    for name in STREAMS:
        delete_stream(amqp_url, prefix + name)


def test_demo_answers_as_the_data_frames_do(amqp_url: str, stream_url: str, database_url: str, prefix: str) -> None:
    """The command publishes, records and finds, and each answer is right; it never touches streams that exist."""
    relatum = Relatum(amqp_url, stream_url, database_url)
    arguments = ("demo", "--flights", "500", "--checked", "50", "--prefix", prefix, "--json")
    ended = relatum.run(*arguments)
    assert ended.returncode == ExitCode.OK, ended.stderr
    result = json.loads(ended.stdout)
    assert result["differences"] == []
    assert result["checked"] > 200
    assert len(result["questions"]) == 5
    assert all(question["answer"] for question in result["questions"])
    again = relatum.run(*arguments)
    assert again.returncode == ExitCode.CONFIGURATION
    assert "--prefix" in again.stderr


def test_three_clicks_lead_from_a_flight_to_its_plane_and_its_weather(
    amqp_url: str, stream_url: str, database_url: str, prefix: str
) -> None:
    """`--web` serves the page when the demo has ended, with a recorder beside it; SIGTERM ends it with 0."""
    relatum = Relatum(amqp_url, stream_url, database_url)
    started = relatum.start("demo", "--flights", "500", "--checked", "1", "--prefix", prefix, "--web", "--port", "0")
    with started as process:
        try:
            assert process.stdout is not None
            said: list[str] = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("RELATUM_WEB_URL="):
                    break
            assert said[-1].startswith("RELATUM_WEB_URL="), said
            with httpx.Client(base_url=said[-1].strip().partition("=")[2], timeout=LIMIT_S) as client:
                flights = client.get("api/search?key=origin&value=JFK&limit=50").json()["results"]
                flight = next(row for row in flights if row["stream"] == f"{prefix}flights")
                message = client.get(f"api{at(flight['stream'], flight['offset'])}").json()
                rows = [row for each in message["related"] for part in each["parts"] for row in part["results"]]
                assert {row["stream"] for row in rows} == {
                    f"{prefix}{name}" for name in ("flights", "planes", "weather")
                }
                plane = next(row for row in rows if row["stream"] == f"{prefix}planes")
                assert "manufacturer" in client.get(at(plane["stream"], plane["offset"])[1:]).text
                wait_until(
                    lambda: {row["state"] for row in client.get("api/streams").json()["streams"]} == {"recording"},
                    what="the recorder beside the page",
                )
        finally:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0


def test_demo_on_private_servers_outlasts_a_machine_that_stands_still(tmp_path: Path) -> None:
    """Away from a terminal it says what it does; killed and run again, it names what is there; RabbitMQ may be slow."""
    directory = tmp_path / "servers"
    arguments = [COMMAND, "demo", "--flights", "500", "--checked", "50", "--directory", str(directory)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RELATUM_")}
    start = partial(subprocess.Popen, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with start([*arguments, "--web", "--port", "0"]) as process:
        try:
            await_line(process.stdout, "3. ")
            broker = processes_naming(str(directory / "rabbitmq"))
            for pid in broker:
                os.kill(pid, signal.SIGSTOP)
            begun = time.monotonic()
            wait_until(lambda: time.monotonic() - begun > STANDSTILL_S, what="more than a look-up has by default")
            for pid in broker:
                os.kill(pid, signal.SIGCONT)
            printed = await_line(process.stdout, "RELATUM_WEB_URL=")
        finally:
            process.kill()
        said = process.communicate(timeout=LIMIT_S)[1]
    assert sum("no differences" in line for line in printed) == 2
    exported = [line.partition("=")[0] for line in printed if line.startswith("export ")]
    assert exported == [f"export RELATUM_{name}_URL" for name in ("BROKER", "STREAM", "DATABASE")]
    assert [line.split()[0] for line in said.splitlines() if line.endswith(" …")] == (
        ["Loading", "Starting", "Publishing", "Reading", "Asking", "Asking", "Asking"]
    )
    with start(arguments) as again:
        said = again.communicate(timeout=LIMIT_S)[1]
    assert again.returncode == ExitCode.CONFIGURATION
    assert f"relatum up --web --directory {directory}" in said


def await_line(output: IO[str] | None, beginning: str) -> list[str]:
    """Read to a line that begins so, and give all that were read."""
    assert output is not None
    lines = []
    for line in output:
        lines.append(line)
        if line.startswith(beginning):
            return lines
    raise AssertionError(f"it ended before {beginning!r}: {''.join(lines)}")


def test_demo_says_that_the_broker_was_lost(tmp_path: Path) -> None:
    """A broker that ends while it is published to is one line and its code, no traceback."""
    directory = tmp_path / "servers"
    arguments = [COMMAND, "demo", "--flights", "500", "--directory", str(directory)]
    with subprocess.Popen(arguments, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        await_line(process.stderr, "Publishing")
        for pid in processes_naming(str(directory / "rabbitmq")):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        said = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == ExitCode.BROKER
    assert "Traceback" not in said


def test_demo_looks_for_the_pages_port_first() -> None:
    """A port that another has is said before minutes are spent."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run("demo", "--web", "--port", str(taken.getsockname()[1]))
    assert (ended.returncode, ended.stdout) == (ExitCode.CONFIGURATION, "")
    assert "--port" in ended.stderr


@pytest.fixture
def data() -> Dataset:
    """A small part of the data, published in a second."""
    whole = load(600)
    return replace(whole, weather=whole.weather.head(600))


def test_demo_notices_wrong_answers(
    amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine, prefix: str, data: Dataset
) -> None:
    """Where the data frames say something else than the streams, each such answer is reported as a difference."""
    servers = Servers(amqp_url, stream_url, database_url, prefix)
    publish_and_record(servers, engine, data, lambda _stream, _count: None)
    planes = data.planes.assign(message_id=[f"other-{number}" for number in range(len(data.planes))])
    with (
        Relations(broker=amqp_url, database=database_url, stream_url=stream_url) as relations,
        StreamReader.open(servers.address) as reader,
    ):
        right = Demonstration(servers, data, relations, reader)
        asked, differences = right.check_many(right.numbers(40, seed=1))
        assert asked > 150
        assert differences == []
        wrong = Demonstration(servers, replace(data, planes=planes), relations, reader)
        _, differences = wrong.check_many(wrong.numbers(40, seed=1))
        expectation = expect_departures(servers)
        report, missing = check_departures(relations, data, expectation)
        assert report.checked > 20
        assert missing == []
        gone = data.flights["time_hour"] == data.flights["time_hour"].iloc[300]
        _, missing = check_departures(relations, replace(data, flights=data.flights[~gone]), expectation)
        assert {(each.expected, each.answered) for each in missing} == {("missing", None)}
    assert differences
    assert {difference.question for difference in differences} == {"Which plane was it?"}


def test_demo_data_leave_out_what_is_missing(data: Dataset) -> None:
    """A flight without a tail number has no such header, and each message's time is an integer."""
    messages = list(data.messages(FLIGHTS))
    rows = data.flights.to_dict("records")
    assert len(messages) == len(rows) == 600
    for message, row in zip(messages, rows, strict=True):
        assert ("tailnum" in message.headers) == isinstance(row["tailnum"], str)
        assert type(message.headers["relatum_time"]) is int
        assert b"NaN" not in message.body
    times = [message.headers["relatum_time"] for message in messages]
    assert times == sorted(times)
