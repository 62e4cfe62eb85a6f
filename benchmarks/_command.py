"""The command line of both sets of measurements: options, groups in turn, a table, a JSON file."""

import argparse
import functools
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

from rich.console import Console

from benchmarks._context import QUICK_MESSAGES, QUICK_ROWS, Context, opened
from benchmarks._results import Row, attempted, load, markdown, save, show

MESSAGES_MIN: Final = 10_000

WIDTH: Final = 200
"""Columns of the table where there is no terminal."""


class Group(Protocol):
    """A module that measures some rows of the table."""

    def measure(self, context: Context) -> Iterable[Row]:
        """Measure the rows."""


def parsed(prog: str, groups: Iterable[str], results: Path, arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Measures Relatum on private servers, or on those that RELATUM_TEST_AMQP_URL, "
        "RELATUM_TEST_STREAM_URL and RELATUM_TEST_DATABASE_URL name.",
    )
    parser.add_argument("--messages", type=int, default=None, help="messages of the large stream (1,000,000)")
    parser.add_argument("--rows", type=int, default=None, help="rows the table grows to (10,000,000)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MESSAGES:,} messages and fewer rounds")
    parser.add_argument("--only", nargs="+", choices=sorted(groups), metavar="NAME", help=", ".join(groups))
    parser.add_argument("--output", type=Path, default=results, help="where the JSON file goes")
    parser.add_argument("--markdown", action="store_true", help="measure nothing; print the JSON file's table")
    options = parser.parse_args(arguments)
    if options.messages is None:
        options.messages = QUICK_MESSAGES if options.quick else 1_000_000
    if options.rows is None:
        options.rows = QUICK_ROWS if options.quick else 10_000_000
    if options.rows < QUICK_ROWS:
        parser.error(f"--rows: at least {QUICK_ROWS:,}")
    if options.messages < MESSAGES_MIN:
        parser.error(f"--messages: at least {MESSAGES_MIN:,}")
    return options


def run(prog: str, groups: Mapping[str, Group], results: Path) -> int:
    """Run the groups asked for.

    Args:
        prog: What the command is called in its help.
        groups: The groups by name, in the order in which they are measured.
        results: Where the JSON file goes, unless an option says otherwise.

    Returns:
        1 where something failed, a wrong answer included; 0 also where figures fall short, which the table says.
    """
    options = parsed(prog, groups, results)
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
    with opened(options.messages, options.rows, say, is_quick=options.quick) as context:
        facts = context.facts()
        for name in options.only or groups:
            for row in attempted(name, name, functools.partial(groups[name].measure, context)):
                rows.append(row)
                figure = "" if row.ratio is None else f" ({row.ratio:.2f})"
                say(f"[bold]{row.what}: {row.ours or row.error or row.note}{figure}: {row.verdict}[/bold]")
                # What was measured is not lost where it is stopped.
                save(options.output, facts | {"seconds": round(time.monotonic() - started)}, rows)
    save(options.output, facts | {"seconds": round(time.monotonic() - started)}, rows)
    show(rows, console)
    console.print(f"{options.output}: all figures, and the machine they are from.")
    return int(any(row.verdict == "failed" for row in rows))
