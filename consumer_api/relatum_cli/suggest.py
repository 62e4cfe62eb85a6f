"""`relatum suggest`: which headers, properties and members of bodies would make keys."""

from typing import Annotated, Any

import typer
from rich.table import Table

from relatum.reading import StreamReader
from relatum.store.catalog import add_keys, backfill_command
from relatum.store.database import as_engine
from relatum.terminal import JsonOption, ServerOptions, argument, console, plain_text, print_json, spread
from relatum_consumer.suggesting import SAMPLE_MESSAGES, Suggestion, sample
from relatum_consumer.suggesting import suggest as suggested

__all__ = ["suggest"]


@spread
def suggest(
    streams: Annotated[list[str], argument("STREAM…", "The streams' names.")],
    messages: Annotated[
        int, typer.Option(min=1, max=100_000, help="Messages of each stream that are looked at.")
    ] = SAMPLE_MESSAGES,
    limit: Annotated[int, typer.Option(min=1, max=256, help="Suggestions at most.")] = 20,
    apply: Annotated[
        bool, typer.Option("--apply", help="Define the keys that are suggested, but those with each value once.")
    ] = False,
    *,
    servers: ServerOptions,
    as_json: JsonOption = False,
) -> None:
    """Say which headers, properties and members of JSON would make keys, by a sample of streams.

    Best are values that several of the streams have, and that tell messages apart: name streams together that belong
    together. The database is only needed for `--apply`. `--json` prints one document: the list.
    """
    with StreamReader.open(servers.address) as reader:
        samples = [sample(reader, stream, messages) for stream in dict.fromkeys(streams)]
    found = suggested(samples)[:limit]
    related = [each.definition for each in found if not each.is_unique]
    stored = []
    if apply and related:
        with as_engine(servers.database_url) as engine:
            stored = add_keys(engine, related)
    if as_json:
        print_json([_document(each) for each in found])
        return
    empty = [each.stream for each in samples if not each.messages]
    if empty:
        console.print(f"No message is in {', '.join(empty)} yet.", markup=False, soft_wrap=True)
    if not found and len(empty) < len(samples):
        console.print("Nothing there tells messages apart. Define what you know:")
        console.print("relatum keys add NAME --source header:NAME, or 'body:$.NAME'.")
    if not found:
        return
    console.print(_table(found))
    if stored:
        console.print(f"Defined: {', '.join(key.name for key in stored)}.", markup=False, soft_wrap=True)
        console.print(f"Messages recorded before: {backfill_command(key.name for key in stored)}", soft_wrap=True)
    elif related:
        console.print("--apply defines those whose values come again, or are in both.", soft_wrap=True)
    if len(stored) < len(found):
        console.print("One by one: relatum keys add KEY --source SOURCE", soft_wrap=True)


def _document(each: Suggestion) -> dict[str, Any]:
    return {
        "name": each.definition.name,
        "source": each.definition.sources,
        "found": each.found,
        "overlap": round(each.overlap, 3),
        "is_unique": each.is_unique,
        "bytes_per_message": round(each.bytes_per_message, 1),
        "score": round(each.score, 3),
    }


def _table(found: list[Suggestion]) -> Table:
    table = Table("key", "source", "in: messages that have it, different values", "in both", "bytes a message")
    for each in found:
        places = "\n".join(f"{one.stream}: {one.share:.0%}, {one.distinct:,}" for one in each.found)
        shared = f"{each.overlap:.0%}" if each.overlap else "–"
        if each.is_unique:
            places += "\n(each value once here: useful when another stream has it too)"
        cells = (each.definition.name, each.definition.sources[0], places, shared, f"{each.bytes_per_message:,.0f}")
        table.add_row(*map(plain_text, cells))
    return table
