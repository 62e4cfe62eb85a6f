"""What docs/contexts.md shows is run, as it stands there."""

import re
from dataclasses import fields

import pytest
import sqlalchemy as sa

from relatum import errors
from relatum.contexts import ContextOptions, SerialOptions
from relatum.superstreams import Layout
from tests.support.pages import blocks_of, names_there, run, text_of
from tests.support.routing import consumed
from tests.support.serial_consuming import serial_bed

PUBLISHING, CONSUMING = text_of("contexts.md", "Publishing\n"), text_of("contexts.md", "Consuming\n")


def test_what_the_page_shows_of_publishing_works(layout: Layout, amqp_url: str, database_url: str) -> None:
    """A consumer gets what the blocks publish, in order."""
    with names_there(amqp_url, database_url) as names:
        for block in blocks_of("contexts.md", "Publishing\n", {"orders": layout.super_stream}):
            run("contexts.md", block, names)
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
        with names_there(amqp_url, database_url) as names:
            names |= {"sa": sa, "send": lambda messages: sent.extend(message.body for message in messages)}
            for block in blocks_of("contexts.md", "Consuming\n", {"orders": bed.name}):
                block = block.replace("batches()", "batches(3.0)")
                block = block.replace("print(*[message.body for message in batch.messages])", "send(batch.messages)")
                run("contexts.md", block, names)
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
