"""What the demo prints for people."""

import json
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from relatum.reading import Message
from relatum.terminal import console
from relatum_consumer.demo._asking import REPEATS, Difference, Timed
from relatum_consumer.demo._data import FLIGHTS, PLANES

DIFFERENCES_SHOWN = 10


def heading(text: str) -> None:
    """A step of the demo."""
    console.print(Text(text, style="bold"))


def describe_flight(flight: Message) -> str:
    """A flight in two lines."""
    row = json.loads(flight.body)
    assert flight.time is not None
    left = "was to leave" if row["dep_time"] is None else "left"
    return (
        f"{row['carrier']} {row['flight']} from {row['origin']} to {row['dest']}, tail number {row['tailnum']},\n"
        f"   which {left} at {flight.time:%Y-%m-%d %H:%M} UTC (message {flight.id})"
    )


def describe(message: Message | None, stream: str) -> str:
    """A message's content in a few words."""
    if message is None:
        return "none"
    row: dict[str, Any] = json.loads(message.body)
    if stream == PLANES:
        built = f", built in {row['year']}" if row["year"] else ""
        return f"{row['manufacturer']} {row['model']}, {row['seats']} seats{built}"
    if stream == FLIGHTS:
        return f"{row['carrier']} {row['flight']} {row['origin']} to {row['dest']}, {message.time:%m-%d %H:%M}"
    wind = "" if row["wind_speed"] is None else f", wind {row['wind_speed']:.0f} mph"
    return f"{row['origin']} {message.time:%m-%d %H:%M}: {row['temp']} °F{wind}"


def milliseconds(seconds: float) -> str:
    """A time as people read it."""
    return f"{seconds * 1e3:,.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def print_timed(timed: Sequence[Timed]) -> None:
    """The questions, their answers and both times."""
    table = Table(box=box.SIMPLE_HEAD, header_style="")
    table.add_column("question and answer")
    for name in ("Relatum", "scanning", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in timed:
        question = Text(f"{each.question.words}\n", style="bold")
        answer = Text(f"by {each.question.how}: {describe(each.answer, each.question.stream)}", style="not bold")
        ratio = f"{each.scan_s / each.relatum_s:,.0f} x"
        table.add_row(question + answer, milliseconds(each.relatum_s), milliseconds(each.scan_s), ratio)
    console.print(table)
    console.print(
        "   Relatum: the index in PostgreSQL, then a read at an offset, the message's\n"
        f"   body included; the median of {REPEATS} times.\n"
        "   Scanning: the same reader reads the whole stream and tests each message.\n"
    )


def print_differences(differences: Sequence[Difference]) -> None:
    """The answers that are wrong."""
    table = Table("flight", "question", "the data frame says", "answered", "by")
    for each in differences[:DIFFERENCES_SHOWN]:
        table.add_row(each.flight, each.question, str(each.expected), str(each.answered), each.by)
    console.print(table)
