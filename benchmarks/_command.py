"""The command line of both benchmark suites: options, groups, a table, a JSON file, and regressions."""

import argparse
import functools
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

from rich.console import Console
from rich.markup import escape

from benchmarks._context import QUICK_MESSAGES, QUICK_ROWS, Context, opened
from benchmarks._kept import FELL, FOLDER, fallen, keep, kept_in, kind_of, path_of
from benchmarks._results import Row, attempted, load, markdown, save, show

MESSAGES_MIN: Final = 10_000

SHORT_MESSAGES: Final = 20_000
SHORT_S: Final = 95.0
"""Seconds after which the short form stops, wherever it is, and shows its results."""

WIDTH: Final = 200
"""Columns of the table without a terminal."""


class Group(Protocol):
    """A module that measures some rows of the table."""

    def measure(self, context: Context) -> Iterable[Row]:
        """Measure the rows."""


class OutOfTime(BaseException):
    """The short form's time is over. A BaseException, so that handlers of errors do not catch it."""


def parsed(
    prog: str, groups: Iterable[str], results: Path, arguments: list[str] | None = None, short: Sequence[str] = ()
) -> argparse.Namespace:
    """Parse the options of the command line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Measures Relatum on private servers, or on those that RELATUM_TEST_AMQP_URL, "
        "RELATUM_TEST_STREAM_URL and RELATUM_TEST_DATABASE_URL name.",
    )
    parser.add_argument("--messages", type=int, default=None, help="messages of the large stream (1,000,000)")
    parser.add_argument("--rows", type=int, default=None, help="rows the table grows to (10,000,000)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MESSAGES:,} messages and fewer rounds")
    if short:
        parser.add_argument("--short", action="store_true", help=f"{', '.join(short)}, in two minutes; ends with 0")
    parser.add_argument("--only", nargs="+", choices=sorted(groups), metavar="NAME", help=", ".join(groups))
    parser.add_argument("--output", type=Path, default=None, help="where the JSON file goes")
    parser.add_argument("--keep", action="store_true", help=f"keep the ratios in {FOLDER.name}/, for later runs")
    parser.add_argument("--markdown", action="store_true", help="measure nothing; print the JSON file's table")
    options = parser.parse_args(arguments)
    options.short = bool(short) and options.short
    if options.short:
        options.quick, options.only = True, options.only or list(short)
    if options.output is None:
        # The short form must not overwrite the results of a whole run.
        options.output = results.with_stem(f"{results.stem}-short") if options.short else results
    if options.messages is None:
        options.messages = SHORT_MESSAGES if options.short else QUICK_MESSAGES if options.quick else 1_000_000
    if options.rows is None:
        options.rows = QUICK_ROWS if options.quick else 10_000_000
    if options.rows < QUICK_ROWS:
        parser.error(f"--rows: at least {QUICK_ROWS:,}")
    if options.messages < MESSAGES_MIN:
        parser.error(f"--messages: at least {MESSAGES_MIN:,}")
    return options


def run(
    prog: str, groups: Mapping[str, Group], results: Path, short: Sequence[str] = (), arguments: list[str] | None = None
) -> int:
    """Run the selected groups.

    Args:
        prog: The command's name in its help.
        groups: The groups by name, in the order of their measurement.
        results: The path of the JSON file, unless an option overrides it.
        short: The groups of the short form. Empty means that there is no short form.
        arguments: The command line's arguments. None uses the process's own.

    Returns:
        1 if a measurement failed or gave a wrong answer, else 0. Missed aims and regressions are only printed. The
        short form always returns 0.
    """
    options = parsed(prog, groups, results, arguments, short)
    if options.markdown:
        sys.stdout.write(markdown(load(options.output)) + "\n")
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    if not options.short:
        _measure(options, groups, console, rows, facts)
        _report(options, console, rows, facts)
        return int(any(row.verdict == "failed" for row in rows))
    try:
        with ended_after(SHORT_S):
            _measure(options, groups, console, rows, facts)
    except OutOfTime:
        console.print(f"{SHORT_S:g} s are over: the rest was not measured")
    except Exception as error:  # noqa: BLE001 - must not fail a build
        console.print(f"not measured: {escape(f'{type(error).__name__}: {error}')}")
    _report(options, console, rows, facts)
    return 0


def _measure(
    options: argparse.Namespace, groups: Mapping[str, Group], console: Console, rows: list[Row], facts: dict[str, Any]
) -> None:
    """Measure, and add the results to `rows` and `facts` as they come, so that an interruption keeps them."""
    started = time.monotonic()

    def say(what: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:5.0f} s  {what}[/dim]", highlight=False)

    def saved() -> None:
        save(options.output, facts | {"seconds": round(time.monotonic() - started)}, rows)

    with opened(options.messages, options.rows, say, is_quick=options.quick) as context:
        facts |= context.facts()
        for name in options.only or groups:
            for row in attempted(name, name, functools.partial(groups[name].measure, context)):
                rows.append(row)
                figure = "" if row.ratio is None else f" ({row.ratio:.2f})"
                say(f"[bold]{row.what}: {row.ours or row.error or row.note}{figure}: {row.verdict}[/bold]")
                # Save each row, so that an interruption loses none.
                saved()
    saved()


def _report(options: argparse.Namespace, console: Console, rows: list[Row], facts: dict[str, Any]) -> None:
    """Show the table, and the regressions since the last kept run on this kind of machine."""
    if not facts:
        return
    show(rows, console)
    console.print(f"{options.output}: all figures, and the machine they are from.")
    path = path_of(FOLDER, facts)
    kept = kept_in(path)
    if options.keep:
        keep(path, facts, rows)
    if not kept:
        console.print(f"No ratios are kept for {kind_of(facts)}: use --keep to store them.")
        return
    found = fallen(rows, kept)
    for each in found:
        console.print(f"[bold red]fell[/]  {escape(str(each))}", highlight=False)
    if not found:
        console.print(f"No ratio fell by more than {FELL:.0%} since those kept for {kind_of(facts)}.")


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the block after these seconds; works only in the main thread."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
