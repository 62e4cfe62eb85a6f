"""What docs/contexts.md shows of consuming is run, as it stands there."""

import asyncio
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import relatum
from relatum import errors
from relatum.contexts import SerialOptions
from tests.support.serial_consuming import serial_bed

PAGE = (Path(__file__).parents[2] / "docs" / "contexts.md").read_text()
CONSUMING = PAGE.partition("\n## Consuming\n")[2].partition("\n## ")[0]


def test_what_the_page_shows_of_consuming_works(
    amqp_url: str, database_url: str, engine: sa.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each way to consume gets all messages of all contexts in order; the status says how far it is."""
    sent: list[bytes] = []
    names: dict[str, Any] = {
        "relatum": relatum,
        "asyncio": asyncio,
        "DATABASE": database_url,
        "BROKER": amqp_url,
        "sa": sa,
        "send": lambda messages: sent.extend(message.body for message in messages),
    }
    with engine.begin() as connection:
        connection.execute(
            sa.text("CREATE TABLE booked (id bigint GENERATED ALWAYS AS IDENTITY, account text, body bytea)")
        )
    with serial_bed(amqp_url, engine) as bed:
        bed.publish(0, "account 17", "opened")
        bed.move(["account 17"], 0, 1)
        bed.publish(1, "account 17", "closed")
        for block in re.findall(r"```python\n(.*?)```", CONSUMING, re.DOTALL):
            block = block.replace('"orders"', repr(bed.name)).replace("batches()", "batches(3.0)")
            block = block.replace("print(*[message.body for message in batch.messages])", "send(batch.messages)")
            exec(compile(block, "docs/contexts.md", "exec"), names)
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
