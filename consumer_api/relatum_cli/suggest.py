"""`relatum suggest`: headers, properties and body members that would make good keys."""

from typing import Any

from relatum.reading import StreamReader
from relatum.store.catalog import add_keys, backfill_command
from relatum_cli.options import Given, argument, option
from relatum_cli.show import print_json, say, show
from relatum_consumer.suggesting import SAMPLE_MESSAGES, Suggestion, sample
from relatum_consumer.suggesting import suggest as suggested


def suggest(
    *,
    streams: list[str] = argument("The streams' names.", "STREAM…"),
    messages: int = option(SAMPLE_MESSAGES, "The most messages to read of each stream.", min=1, max=100_000),
    limit: int = option(20, "The most suggestions.", min=1, max=256),
    apply: bool = option(False, "Define the suggested keys, except those whose values are all different.", "--apply"),
    given: Given,
) -> None:
    """Suggest keys, from a sample of streams.

    Candidates are headers, properties and members of JSON bodies. The best have values that occur in several of the
    streams and distinguish messages, so name related streams together. Only `--apply` needs the database. `--json`
    prints one document: the list.
    """
    with StreamReader.open(given.broker) as reader:
        samples = [sample(reader, stream, messages) for stream in dict.fromkeys(streams)]
    found = suggested(samples)[:limit]
    related = [each.definition for each in found if not each.is_unique]
    stored = []
    if apply and related:
        with given.engine() as engine:
            stored = add_keys(engine, related)
    if given.as_json:
        print_json([_document(each) for each in found])
        return
    empty = [each.stream for each in samples if not each.messages]
    if empty:
        say(f"No messages yet in {', '.join(empty)}.")
    if not found and len(empty) < len(samples):
        say("Nothing in the sample distinguishes messages. Define a key that you know:")
        say("relatum keys add NAME --source header:NAME, or 'body:$.NAME'.")
    if not found:
        return
    columns = {
        "key": lambda each: each.definition.name,
        "source": lambda each: each.definition.sources[0],
        "in: messages that have it, different values": _places,
        "in both": lambda each: f"{each.overlap:.0%}" if each.overlap else None,
        "bytes a message": lambda each: round(each.bytes_per_message),
    }
    show(found, columns)
    if stored:
        say(f"Defined: {', '.join(key.name for key in stored)}.")
        say(f"Messages recorded before: {backfill_command(key.name for key in stored)}")
    elif related:
        say("--apply defines the keys whose values repeat, or occur in several streams.")
    if len(stored) < len(found):
        say("One by one: relatum keys add KEY --source SOURCE")


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


def _places(each: Suggestion) -> str:
    places = "\n".join(f"{one.stream}: {one.share:.0%}, {one.distinct:,}" for one in each.found)
    return places + ("\n(each value once here: useful when another stream has it too)" if each.is_unique else "")
