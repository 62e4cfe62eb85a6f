"""What the pages of contexts, affinity sets and super streams show is run, as it stands there."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields

import pytest
import sqlalchemy as sa

import relatum
from relatum import errors
from relatum.contexts import AffinityOptions, ContextOptions, SerialOptions
from relatum.superstreams import Layout, StreamOptions, declare_super_stream, describe_super_stream
from tests.support import broker_connection, unique_name
from tests.support.affinity import Partitions
from tests.support.pages import run_blocks, section
from tests.support.routing import consumed
from tests.support.serial_consuming import serial_bed
from tests.support.super_streams import bodies, delete_by_hand

PUBLISHING, CONSUMING = section("contexts.md", "Publishing"), section("contexts.md", "Consuming")


@pytest.fixture
def name(amqp_url: str) -> Iterator[str]:
    """The name of a super stream that is not there yet."""
    name = unique_name("relatum-flights")
    yield name
    delete_by_hand(amqp_url, name, *(partition.stream for partition in Layout.numbered(name, 3)))


def test_what_the_page_shows_of_super_streams_works(
    amqp_url: str, stream_url: str, database_url: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All messages are there, and what is said to be printed is."""
    with broker_connection(amqp_url) as connection:
        urls = {"BROKER": amqp_url, "DATABASE": database_url}
        run_blocks(section("super-streams.md"), {'"flights"': repr(name)}, connection=connection, **urls)
        relatum.release(connection)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == [f"{place} {name}-{place} {place}" for place in range(3)]
    assert printed[-1] == f"{name}-1"
    layout = describe_super_stream(amqp_url, name, stream_url=stream_url)
    assert layout == declare_super_stream(amqp_url, name, 3, stream_url=stream_url)
    assert sum(map(len, bodies(stream_url, layout).values())) == 6


def test_the_page_names_each_option_of_super_streams() -> None:
    """What a super stream to publish to, and what new streams, can be given stands in the tables."""
    page = section("super-streams.md")
    for parameters in (inspect.signature(relatum.SuperStream), inspect.signature(StreamOptions)):
        for parameter in parameters.parameters:
            assert f"| `{parameter}` |" in page, parameter


def test_what_the_page_shows_of_sets_works(
    layout: Layout, amqp_url: str, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What joins a set lies with it, and the open sets are listed."""
    page, of_predecessors = section("affinity.md"), section("affinity.md").index("### By a predecessor")
    renamed = {'"invoices"': repr(layout.super_stream)}
    with broker_connection(amqp_url) as connection:
        try:
            names = {"connection": connection, "BROKER": amqp_url, "DATABASE": database_url}
            names |= run_blocks(page[:of_predecessors], renamed, AffinityOptions=AffinityOptions, **names)
            with relatum.AffinityRouter(layout.super_stream, database_url) as names["router"]:
                names |= run_blocks(page[of_predecessors:], renamed, **names)
        finally:
            relatum.release(connection)
    assert list(Partitions(amqp_url, layout).of_set("invoice 18").values()) == [[b"2 lamps", b"120 EUR"]]
    assert "invoice 17" in capsys.readouterr().out
    assert names["handle"].partition is not None


def test_what_the_page_shows_of_publishing_works(layout: Layout, amqp_url: str, database_url: str) -> None:
    """A consumer gets what the blocks publish, in order."""
    with broker_connection(amqp_url) as connection:
        urls = {"BROKER": amqp_url, "DATABASE": database_url}
        run_blocks(PUBLISHING, {'"orders"': repr(layout.super_stream)}, connection=connection, **urls)
        relatum.release(connection)
    found = consumed(layout.super_stream, database_url, amqp_url, 5)
    assert found == {"account 17": [b"opened", b"credited", b"debited", b"closed", b"archived"]}


def test_the_page_names_the_routers_options_and_defaults() -> None:
    """Each option of the table is one of the routers', with the default given there, and none is left out."""
    rows = re.findall(r"^\| `(\w+)` \| `?\"?([\w,. ]+?)\"?`? \|", PUBLISHING, re.MULTILINE)
    told = {name: value for name, value in rows if name.islower() or "_" in name}
    wanted = {each.name: each.default for each in fields(ContextOptions)}
    assert set(told) == set(wanted)
    for name, default in wanted.items():
        assert told[name].replace(",", "") == (f"{default:g}" if isinstance(default, float) else str(default))


def test_what_the_page_shows_of_consuming_works(
    amqp_url: str, database_url: str, engine: sa.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each way to consume gets all messages of all contexts in order; the status says how far it is."""
    sent: list[bytes] = []
    with engine.begin() as connection:
        connection.execute(
            sa.text("CREATE TABLE booked (id bigint GENERATED ALWAYS AS IDENTITY, account text, body bytea)")
        )
    with serial_bed(amqp_url, engine) as bed:
        bed.publish(0, "account 17", "opened")
        bed.move(["account 17"], 0, 1)
        bed.publish(1, "account 17", "closed")
        renamed = {
            '"orders"': repr(bed.name),
            "batches()": "batches(3.0)",
            "print(*[message.body for message in batch.messages])": "send(batch.messages)",
        }
        run_blocks(
            CONSUMING,
            renamed,
            sa=sa,
            DATABASE=database_url,
            BROKER=amqp_url,
            send=lambda messages: sent.extend(message.body for message in messages),
        )
        streams = bed.streams
    assert sent == [b"opened", b"closed"]
    with engine.connect() as connection:
        booked = connection.execute(sa.text("SELECT account, body FROM booked ORDER BY id")).all()
    assert [tuple(row) for row in booked] == [("account 17", b"opened"), ("account 17", b"closed")] * 2
    assert f"{streams[1]} 2 0 " in capsys.readouterr().out


def test_the_page_names_the_consumers_options_and_errors() -> None:
    """Each option is in the table, with the default of it; the errors named there are there."""
    table = dict(re.findall(r"^\| (`.*?`) \| (.*?) \|", CONSUMING, re.MULTILINE))
    told = {name for names in table for name in re.findall(r"`(\w+)`", names) if not hasattr(errors, name)}
    defaults = {each.name: each for each in fields(SerialOptions)}
    assert told == set(defaults)
    assert table["`batch_s`"] == str(defaults["batch_s"].default)
    assert table["`lease_s`"] == f"{defaults['lease_s'].default:g}"
    assert table["`batch_messages`, `batch_bytes`"] == "1,000, 4 MiB"
    assert (defaults["batch_messages"].default, defaults["batch_bytes"].default) == (1_000, 4 << 20)
