"""`relatum super-stream`: make, describe and delete super streams, and tell where keys go."""

import subprocess
from collections.abc import Iterator

import pytest

from relatum.errors import SuperStreamNotFound
from relatum.superstreams import Layout, declare_super_stream, describe_super_stream
from relatum.terminal import ExitCode
from tests.acceptance._command import COMMAND, Relatum
from tests.support import unique_name
from tests.support.super_streams import delete_by_hand


@pytest.fixture
def relatum(amqp_url: str, stream_url: str) -> Relatum:
    """The command; it needs no database."""
    return Relatum(amqp_url, stream_url, "")


@pytest.fixture
def name(amqp_url: str) -> Iterator[str]:
    """The name of a super stream that is not there yet."""
    name = unique_name("relatum-super")
    yield name
    delete_by_hand(amqp_url, name, *(f"{name}-{end}" for end in ("0", "1", "2", "emea", "apac")))


def test_a_super_stream_comes_and_goes(relatum: Relatum, name: str) -> None:
    """What is declared is described, routed to and deleted; JSON says all of it."""
    partitions = [{"place": place, "stream": f"{name}-{place}", "binding_key": str(place)} for place in range(3)]
    document = {"super_stream": name, "partitions": partitions}
    assert relatum.json("super-stream", "declare", name, "--max-age", "7d") == document
    assert f"{name}-2" in relatum.ok("super-stream", "describe", name)
    assert relatum.ok("super-stream", "route", name, "hello1", "hello2") == f"hello1: {name}-1\nhello2: {name}-0\n"
    assert relatum.json("super-stream", "delete", name, "--yes") == document
    ended = relatum.run("super-stream", "describe", name)
    assert (ended.returncode, ended.stdout) == (ExitCode.NOT_THERE, "")
    assert name in ended.stderr


def test_binding_keys_are_taken_in_their_order(relatum: Relatum, amqp_url: str, stream_url: str, name: str) -> None:
    """Repeated keys name the partitions; a number they do not make is wrong usage, other partitions are a conflict.

    With the number of partitions given, keys are routed without any server.
    """
    keys = ("--binding-key", "emea", "--binding-key", "apac")
    relatum.ok("super-stream", "declare", name, *keys)
    assert describe_super_stream(amqp_url, name, stream_url=stream_url) == Layout.keyed(name, ["emea", "apac"])
    assert relatum.run("super-stream", "declare", name, "--partitions", "4").returncode == ExitCode.DIFFERENT
    assert relatum.run("super-stream", "declare", name, "--partitions", "4", *keys).returncode == ExitCode.USAGE
    nowhere = Relatum("amqp://127.0.0.1:1/", "rabbitmq-stream://127.0.0.1:1", "")
    routed = [{"key": "hello1", "place": 1, "stream": "orders-1", "binding_key": "1"}]
    assert nowhere.json("super-stream", "route", "orders", "hello1", "--partitions", "3") == routed
    assert nowhere.run("super-stream", "route", "orders", "hello1").returncode == ExitCode.BROKER


def test_deleting_asks(relatum: Relatum, amqp_url: str, stream_url: str, name: str) -> None:
    """Without `--yes` nothing is deleted unless the answer is yes; the question names the streams."""
    declare_super_stream(amqp_url, name, 1, stream_url=stream_url)
    command = [str(COMMAND), "super-stream", "delete", name]

    def answered(answer: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, env=relatum.environment, input=answer, capture_output=True, text=True, timeout=90, check=False
        )

    for answer in ("n\n", ""):
        refused = answered(answer)
        assert refused.returncode == ExitCode.DECLINED
        assert f"{name}-0" in refused.stderr
        assert refused.stderr.endswith("[y/N]: \nnothing was done\n")
    assert len(describe_super_stream(amqp_url, name, stream_url=stream_url)) == 1
    assert relatum.run("super-stream", "delete", name, "--json").returncode == ExitCode.USAGE
    assert answered("y\n").returncode == ExitCode.OK
    with pytest.raises(SuperStreamNotFound):
        describe_super_stream(amqp_url, name, stream_url=stream_url)
