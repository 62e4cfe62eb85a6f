"""What the demo prints for people: a story in one screen of 80 columns."""

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from relatum.reading import Message
from relatum.terminal import console, table_of
from relatum_consumer.demo._asking import REPEATS, Difference, Timed
from relatum_consumer.demo._data import FLIGHTS, PLANES, WEATHER, Data
from relatum_consumer.expectations import MissingReport

DIFFERENCES_SHOWN = 10


def print_published(data: Data, publish_s: float, recorded_s: float) -> None:
    """What was published and recorded."""
    flights, planes, reports = (f"{len(data[name]):,}" for name in (FLIGHTS, PLANES, WEATHER))
    _say(
        "Published",
        f"{flights} flights that left New York in 2013, {planes} planes and {reports} weather reports, to three "
        f"RabbitMQ streams in {publish_s:.1f} s. Headers say what a message is about: tailnum, origin, time_hour.",
    )
    _say("Recorded", f"{recorded_s:.2f} s later: PostgreSQL knows where each value is.\n")


def print_answers(flight: Message, timed: Sequence[Timed]) -> None:
    """The questions about a flight, their answers and both times."""
    row = json.loads(flight.body)
    _say(
        "Asked",
        f"What belongs to flight {row['carrier']} {row['flight']} from {row['origin']} to {row['dest']}, tail number "
        f"{row['tailnum']}, which left on {flight.time:%d %b at %H:%M} UTC (message {flight.id})?",
    )
    console.print(f"{'Relatum':>69}{'scanning':>10}", style="dim")
    for each in timed:
        answer = _describe(each.answer, each.question.stream)
        times = f"{_milliseconds(each.relatum_s):>10}{_milliseconds(each.scan_s):>10}"
        console.print(f"{each.question.words:28}{answer:31}{times}")
    _say("", f"Relatum: an index and a short read (median of {REPEATS}). Scanning: all.\n")


def print_checked(asked: int, report: MissingReport, differences: Sequence[Difference]) -> None:
    """What was proved, and the answers that are wrong."""
    _say(
        "Checked",
        f"{asked:,} more answers, and which of {report.checked:,} weather reports no flight followed within the hour "
        f"({report.missing_count:,}; {report.late_count:,} came late). Compared with what was published: "
        f"{len(differences) or 'no'} differences.\n",
    )
    if differences:
        table = table_of("message", "question", "the rows say", "answered", "by")
        for each in differences[:DIFFERENCES_SHOWN]:
            table.add_row(each.message, each.question, str(each.expected), str(each.answered), each.by)
        console.print(table)


def _say(label: str, text: str) -> None:
    """A part of the story: a word, and some lines beside it."""
    for line in textwrap.wrap(text, 68):
        console.print(Text.assemble((f"{label:12}", "bold"), line))
        label = ""
    if text.endswith("\n"):
        console.print()


def _describe(message: Message, stream: str) -> str:
    """A message's content in a few words."""
    row: dict[str, Any] = json.loads(message.body)
    if stream == PLANES:
        return f"{row['manufacturer']} {row['model']}"
    if stream == FLIGHTS:
        return f"{row['carrier']} {row['flight']} {row['origin']}-{row['dest']}, {message.time:%d %b %H:%M}"
    return f"{row['origin']} {message.time:%d %b %H:%M}, {row['temp']} °F"


def _milliseconds(seconds: float) -> str:
    """A time as people read it."""
    return f"{seconds * 1e3:,.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"
