"""`relatum outcome`: what became of messages that a collector took."""

from collections.abc import Collection
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from relatum.outcomes import Outcome, Outcomes, OutcomeStatus
from relatum.terminal import (
    DatabaseOption,
    ExitCode,
    JsonOption,
    argument,
    console,
    moment_text,
    option,
    plain_text,
    print_json,
    require_database,
)


def outcome(
    message_ids: Annotated[list[str], argument("ID…", "The messages' ids.")],
    collector: Annotated[str | None, option("What became of them in this collector alone.")] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what became of messages: unknown, collected, forwarded, succeeded, failed or dead, with times and reason.

    Ends with 0 where all succeeded, 10 where one failed or is dead, 6 where one is unknown, 8 where one is not final
    yet; the first that holds. A collector that is not there is 6, too. `--json` prints one document, the list of
    outcomes.
    """
    with Outcomes(require_database(database)) as outcomes:
        found = list(outcomes.of_many(message_ids, collector=collector).values())
    if as_json:
        print_json([_document(each) for each in found])
    else:
        print_outcomes(found)
    statuses = {each.status for each in found}
    if statuses & {OutcomeStatus.FAILED, OutcomeStatus.DEAD}:
        raise typer.Exit(ExitCode.UNSUCCESSFUL)
    if OutcomeStatus.UNKNOWN in statuses:
        raise typer.Exit(ExitCode.NOT_THERE)
    if not all(status.is_final for status in statuses):
        raise typer.Exit(ExitCode.NOT_YET)


def _document(outcome: Outcome) -> dict[str, Any]:
    """An outcome for `--json`."""
    document = asdict(outcome) | {"status": outcome.status.value, "is_final": outcome.is_final}
    return document | {"others": [_document(each) for each in outcome.others]}


def print_outcomes(found: Collection[Outcome]) -> None:
    """Print outcomes for people, a block for each message."""
    for first in found:
        for each in (first, *first.others):
            # Wrapped by the terminal alone, so that an id can be copied whole.
            console.print(plain_text(f"{each.message_id}: {each.status.value}", "bold"), soft_wrap=True)
            table = Table(show_header=False)
            table.add_column(no_wrap=True)
            table.add_column(overflow="fold")
            for label, value in _facts(each):
                table.add_row(label, plain_text(value))
            if table.row_count:
                console.print(table)


def _facts(outcome: Outcome) -> list[tuple[str, str]]:
    """What is known of a message that a collector has taken."""
    if outcome.collector is None:
        return []
    facts = [
        ("collector", outcome.collector),
        ("type", outcome.type or "–"),
        ("place", f"{outcome.stream}@{outcome.offset}"),
        ("attempts", f"{outcome.attempts:,}"),
        ("collected", moment_text(outcome.collected_at)),
        ("forwarded", moment_text(outcome.forwarded_at)),
        ("finished", moment_text(outcome.finished_at)),
    ]
    return facts if outcome.reason is None else [*facts, ("reason", outcome.reason)]
