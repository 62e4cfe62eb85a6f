"""Options that the commands of `relatum spark` share, and how their values are written. Imports no PySpark."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeAlias

import typer

from relatum.terminal import parse_span


def parse_names(text: str) -> list[str]:
    """Names of streams, separated by commas.

    Raises:
        typer.BadParameter: one is empty.
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise typer.BadParameter(f"{text!r} has an empty name of a stream")
    return names


class Direction(StrEnum):
    """Which message in time matches."""

    BACKWARD = "backward"
    FORWARD = "forward"
    NEAREST = "nearest"


StreamsArgument: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="STREAM…", help="Streams and super streams.", show_default=False)
]
LeftArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="LEFT", help="A stream or super stream, or several with commas.", show_default=False)
]
RightArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="RIGHT", help="What it is matched with, written likewise.", show_default=False)
]

PayloadsOption: TypeAlias = Annotated[bool, typer.Option("--payloads", help="Also read the messages.")]
OnOption: TypeAlias = Annotated[
    list[str],
    typer.Option("--on", metavar="KEY", help="Equal in this key; repeatable: in all of them.", show_default=False),
]


def span_option(name: str, help_text: str) -> typer.models.OptionInfo:
    """An option that takes a span of time."""
    found: typer.models.OptionInfo = typer.Option(
        name, metavar="SPAN", parser=parse_span, help=help_text, show_default=False
    )
    return found


@dataclass(frozen=True, slots=True)
class SpanOptions:
    """How far apart two messages may be in time; see `spread`."""

    within: Annotated[float | None, span_option("--within", "At most so far apart in time, both ways.")] = None
    before: Annotated[float | None, span_option("--before", "Instead: RIGHT at most so much earlier.")] = None
    after: Annotated[float | None, span_option("--after", "Instead: RIGHT at most so much later.")] = None


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """Where and how wide Spark works; see `spread`."""

    partitions: Annotated[
        int | None, typer.Option(help="Tasks that read at once.", min=1, max=10_000, show_default=False)
    ] = None
    master: Annotated[
        str | None,
        typer.Option(
            envvar="RELATUM_SPARK_MASTER",
            metavar="URL",
            help="Where Spark runs: local[4], spark://host:7077, yarn, k8s://…, or sc://host:15002 for Spark Connect. "
            "Left out: what spark-submit says, else local[*,4].",
            show_default=False,
        ),
    ] = None
    conf: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A setting of Spark; repeatable.", show_default=False),
    ] = None
    jars: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="A jar for driver and executors; repeatable. "
            "Left out: PostgreSQL's JDBC driver where it is installed.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class RowOptions(SparkOptions):
    """The same, and where the rows go; see `spread`."""

    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the rows here: FILE.parquet, .csv or .jsonl on this machine, or a URL such as s3a://…/x.parquet"
            ": a directory that the executors write into.",
            show_default=False,
        ),
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --output names.")] = False
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            help="At most so many rows. Left out: all of them with --json or --output, else 20.",
            min=1,
            max=2_147_483_647,
            show_default=False,
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document for each row.")] = False
