"""`relatum read` and `relatum outcome`: messages at offsets, and the outcomes of messages in collectors."""

from typing import TYPE_CHECKING, Any, Final

import typer

from relatum.ids import MessageId
from relatum_cli.exits import ExitCode
from relatum_cli.options import BrokerOptions, DatabaseOptions, Json, argument, option
from relatum_cli.show import message_document, print_facts, print_json, print_messages, with_properties

if TYPE_CHECKING:
    from relatum.outcomes import Outcome
    from relatum.reading import Message


def read(
    *,
    stream: str = argument("The stream."),
    offsets: list[int] = argument("The messages' offsets.", "OFFSET…", min=0),
    given: BrokerOptions,
    as_json: Json = False,
) -> None:
    """Read messages at offsets, without the database.

    An offset without a message exits with code 6; the messages before it are printed. `--json` prints JSON
    lines, one message each.
    """
    from relatum.reading import StreamReader

    found: list[Message] = []
    try:
        with StreamReader.open(given.broker) as reader:
            for result in reader.read_many([MessageId(stream, offset) for offset in offsets]):
                if isinstance(result, Exception):
                    raise result
                if as_json:
                    print_json(message_document(result), one_line=True)
                else:
                    found.append(result)
    finally:
        if found:
            print_messages(found)


def outcome(
    *,
    message_ids: list[str] = argument("The messages' ids.", "ID…"),
    collector: str | None = option(None, "Only their outcomes in this collector."),
    given: DatabaseOptions,
    as_json: Json = False,
) -> None:
    """Show what became of messages that collectors took.

    Each is unknown, collected, forwarded, succeeded, failed or dead, with times and reason. Exits with 10 if one failed
    or is dead, else with 6 if one is unknown, else with 8 if one is not final yet, else with 0. An unknown collector
    exits with 6, too. `--json` prints one document, the list of outcomes.
    """
    from relatum.outcomes import Outcomes, OutcomeStatus

    with Outcomes(given.database_url) as outcomes:
        found = list(outcomes.of_many(message_ids, collector=collector).values())
    if as_json:
        print_json([_document(each) for each in found])
    else:
        for first in found:
            for each in (first, *first.others):
                print_outcome(each)
    statuses = {each.status for each in found}
    if statuses & {OutcomeStatus.FAILED, OutcomeStatus.DEAD}:
        raise typer.Exit(ExitCode.UNSUCCESSFUL)
    if OutcomeStatus.UNKNOWN in statuses:
        raise typer.Exit(ExitCode.NOT_THERE)
    if not all(status.is_final for status in statuses):
        raise typer.Exit(ExitCode.NOT_YET)


def _document(outcome: "Outcome") -> dict[str, Any]:
    others = [_document(each) for each in outcome.others]
    return with_properties(outcome, "is_final") | {"others": others}


_OUTCOME: Final = "collector type stream offset attempts collected_at forwarded_at finished_at reason"


def print_outcome(outcome: "Outcome") -> None:
    """Print one outcome as text."""
    names = () if outcome.collector is None else _OUTCOME.split()
    facts = [(name.replace("_", " "), getattr(outcome, name)) for name in names]
    print_facts(f"{outcome.message_id}: {outcome.status.value}", facts)
