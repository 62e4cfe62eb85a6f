"""`relatum outcome`: what became of messages that a collector took."""

from collections.abc import Collection
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from relatum.collecting import Outcome, Outcomes, OutcomeStatus
from relatum.command._exits import ExitCode
from relatum.command._options import DatabaseOption, JsonOption, require_database
from relatum.command._output import console, print_json


def outcome(
    message_ids: Annotated[list[str], typer.Argument(metavar="ID…", help="The messages' ids.", show_default=False)],
    collector: Annotated[
        str | None, typer.Option(help="What became of them in this collector alone.", show_default=False)
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what became of messages: unknown, collected, forwarded, succeeded, failed or dead, with times and reason.

    Ends with 0 where all succeeded, 10 where one failed or is dead, 6 where one is unknown, 8 where one is not final
    yet; the first that holds. `--json` prints one document, the list of outcomes.
    """
    with Outcomes(require_database(database)) as outcomes:
        found = list(outcomes.of_many(message_ids, collector=collector).values())
    if as_json:
        print_json([outcome_document(each) for each in found])
    else:
        _print(found)
    code = code_of(found)
    if code is not ExitCode.OK:
        raise typer.Exit(code)


def code_of(found: Collection[Outcome]) -> ExitCode:
    """The exit code for some outcomes: what needs doing most."""
    statuses = {each.status for each in found}
    if statuses & {OutcomeStatus.FAILED, OutcomeStatus.DEAD}:
        return ExitCode.UNSUCCESSFUL
    if OutcomeStatus.UNKNOWN in statuses:
        return ExitCode.NOT_THERE
    if not all(status.is_final for status in statuses):
        return ExitCode.NOT_YET
    return ExitCode.OK


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """An outcome for `--json`."""
    document = {name: value for name, value in asdict(outcome).items() if name != "others"}
    return {
        **document,
        "status": outcome.status.value,
        "is_final": outcome.is_final,
        "others": [outcome_document(each) for each in outcome.others],
    }


def _print(found: Collection[Outcome]) -> None:
    table = Table("message", "status", "collector", "place", "attempts", "collected", "finished", "reason")
    for first in found:
        for each in (first, *first.others):
            place = "–" if each.stream is None else f"{each.stream}@{each.offset}"
            cells = (each.message_id, each.status.value, each.collector or "–", place, f"{each.attempts:,}")
            times = (_moment(each.collected_at), _moment(each.finished_at))
            table.add_row(*(Text(cell) for cell in (*cells, *times, each.reason or "")))
    console.print(table)


def _moment(at: datetime | None) -> str:
    return "–" if at is None else f"{at:%Y-%m-%d %H:%M:%S %Z}"
