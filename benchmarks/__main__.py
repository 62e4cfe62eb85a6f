"""`python -m benchmarks`: measure, print a table, write a JSON file."""

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks import bloom, lag, lookups, many, publishing, recording, sizes
from benchmarks._context import QUICK_MESSAGES, opened
from benchmarks._results import Row, attempted, load, markdown, save, show

# The recorder first: what it records last is what is looked up afterwards.
GROUPS: Final = {group.GROUP: group for group in (recording, lookups, bloom, many, publishing, lag, sizes)}

RESULTS: Final = Path(__file__).with_name("results.json")

MESSAGES_MIN: Final = 10_000

WIDTH: Final = 200
"""Columns of the table where there is no terminal."""


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures Relatum on private servers, or on those that RELATUM_TEST_AMQP_URL, "
        "RELATUM_TEST_STREAM_URL and RELATUM_TEST_DATABASE_URL name.",
    )
    parser.add_argument("--messages", type=int, default=None, help="messages of the large stream (1,000,000)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MESSAGES:,} messages and fewer rounds")
    parser.add_argument("--only", nargs="+", choices=sorted(GROUPS), metavar="NAME", help=", ".join(GROUPS))
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON file goes")
    parser.add_argument("--markdown", action="store_true", help="measure nothing; print the JSON file's table")
    options = parser.parse_args(arguments)
    if options.messages is None:
        options.messages = QUICK_MESSAGES if options.quick else 1_000_000
    if options.messages < MESSAGES_MIN:
        parser.error(f"--messages: at least {MESSAGES_MIN:,}")
    return options


def main() -> int:
    """Run the groups asked for.

    Returns:
        1 where something failed, a wrong answer included; 0 also where figures fall short, which the table says.
    """
    options = parsed()
    if options.markdown:
        sys.stdout.write(markdown(load(options.output)) + "\n")
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    started = time.monotonic()

    def say(what: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:5.0f} s  {what}[/dim]", highlight=False)

    rows: list[Row] = []
    with opened(options.messages, say, is_quick=options.quick) as context:
        facts = context.facts()
        for name in options.only or GROUPS:
            for row in attempted(name, name, functools.partial(GROUPS[name].measure, context)):
                rows.append(row)
                figure = "" if row.ratio is None else f" ({row.ratio:.2f})"
                say(f"[bold]{row.what}: {row.ours or row.error or row.note}{figure}: {row.verdict}[/bold]")
    save(options.output, facts | {"seconds": round(time.monotonic() - started)}, rows)
    show(rows, console)
    console.print(f"{options.output}: all figures, and the machine they are from.")
    return int(any(row.verdict == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
