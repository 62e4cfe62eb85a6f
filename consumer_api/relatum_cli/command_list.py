"""What the list of commands says of each, so that it is shown without importing one of them."""

from collections.abc import Mapping
from typing import Final

HELP: Final[Mapping[str, str]] = {
    "up": "Run a private RabbitMQ and PostgreSQL, print their URLs, and stop both on Ctrl-C.",
    "demo": "Publish, record and find real messages: flights, their planes and the weather. Checks its own answers.",
    "migrate": "Make the schema `relatum`, or bring it to this release's revision. Safe to run again.",
    "keys": "Define relationship keys, list and remove them.",
    "suggest": "Say which headers, properties and members of JSON would make keys, by a sample of streams.",
    "tap": "Have a copy of each message of exchanges put into a stream, without a word to their publishers.",
    "untap": ("Take taps away. What was copied stays in its stream, and what was recorded of it, but for `--delete`."),
    "record": "Record streams: catch up from the coverage, then follow their tails, until SIGTERM or Ctrl-C.",
    "find": "Find the messages whose KEY has this VALUE.",
    "related": "Find the messages that belong to the one at OFFSET of STREAM: by equal keys, or by time.",
    "around": (
        "Show what happened around a MOMENT, in all recorded streams, merged by time: the messages nearest to it."
    ),
    "trace": "Show all messages that are connected with one, or with a key's value, and what came from what.",
    "groups": (
        "List the groups that are not complete, or contradict themselves, or all; show one, or a consumer of groups."
    ),
    "expect": "Define what is to follow messages, list it and remove it: what `relatum missing` looks for.",
    "missing": (
        "List the messages that nothing has followed in time, as the expectation NAME has it; or all expectations."
    ),
    "read": "Read messages at offsets, without the database.",
    "status": (
        "Show for each stream: first and last offset, what is recorded, holes, gaps, lag, rows, size, and "
        "what happened."
    ),
    "web": ("Serve a page, and a JSON API, to look at messages and what belongs to them, until SIGTERM or Ctrl-C."),
    "mcp": (
        "Serve look-ups to an agent, as tools of the Model Context Protocol over stdin and stdout; they only read."
    ),
    "outcome": (
        "Show what became of messages: unknown, collected, forwarded, succeeded, failed or dead, with times and reason."
    ),
    "backfill": (
        "Read streams again and record what is not recorded yet. Stop it whenever you like: it goes on from there."
    ),
    "verify": "Read the streams and compare: every message's keys have their rows, every row's message has that key.",
    "prune": "Delete the rows of messages that retention has dropped, and those of removed keys, in bounded batches.",
    "forget": "Delete all that was recorded of streams, in bounded batches; the streams themselves are left alone.",
    "super-stream": "Make, describe and delete super streams, and tell where keys go.",
    "affinity": "List, show, close and move affinity sets.",
    "contexts": "Place serialization contexts, move them between partitions in order, and verify it.",
}
"""The first paragraph of each command's own help, in the order of the list.

A command that is not here is imported for its help, and stands at the end.
"""
