"""The command `relatum spark`: back-fills, joins and comparisons by Spark, on this machine or on a cluster.

It can be imported without PySpark; its commands then end with a clear error.
"""

from dataclasses import asdict
from typing import Annotated, Any

import typer

import relatum_spark
from relatum.recording import exit_with, offsets_bar, print_backfilled, print_verified, verified_document
from relatum.terminal import BrokerOptions, JsonOption, ServerOptions, print_json, spread
from relatum_spark.command._options import (
    Direction,
    LeftArgument,
    OnOption,
    PayloadsOption,
    RightArgument,
    RowOptions,
    SpanOptions,
    SparkOptions,
    StreamsArgument,
    parse_names,
    span_option,
)

app = typer.Typer(
    name="spark",
    help="Back-fill, join and compare with Spark, on this machine or on a cluster.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    epilog="Needs `pip install 'relatum[spark]'` and Java 17 or newer. Rows come in no order. "
    "A SPAN is a number of seconds, or 90s, 15m, 6h, 2d.",
)


@app.command()
@spread
def backfill(
    streams: StreamsArgument,
    *,
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--keys", "-k", metavar="NAME", help="Only this key; repeatable. All where left out.", show_default=False
        ),
    ] = None,
    messages_per_s: Annotated[
        float | None,
        typer.Option(help="Read at most so many messages a second, all tasks together.", min=1, show_default=False),
    ] = None,
    options: SparkOptions,
    servers: ServerOptions,
    as_json: JsonOption = False,
) -> None:
    """Record what streams hold and the table lacks, in parallel. Stop it whenever you like: it goes on from there.

    `--json` prints one document, as `relatum backfill` does.
    """
    where = _where(servers)
    with _job().session(options) as spark, offsets_bar() as bar:
        reports = relatum_spark.backfill(
            spark,
            streams,
            keys=keys or None,
            messages_per_s=messages_per_s,
            partitions=options.partitions,
            progress=_job().Bars(bar),
            **where,
        )
    print_backfilled(reports, as_json=as_json)


@app.command()
@spread
def verify(
    streams: StreamsArgument,
    *,
    sample: Annotated[
        float | None,
        typer.Option(
            help="Compare this share of each stream only, 0 to 1, a window at least; all of it where left out.",
            min=0,
            max=1,
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="With --sample: choose the same sample again.", show_default=False)
    ] = None,
    options: SparkOptions,
    servers: ServerOptions,
    as_json: JsonOption = False,
) -> None:
    """Compare streams and table in both directions, in parallel. Nothing is written; `relatum verify` also repairs.

    Ends with code 7 where they differ, with 6 where a stream was never recorded. `--json` prints one document, as
    `relatum verify` does.
    """
    where = _where(servers)
    with _job().session(options) as spark:
        report = relatum_spark.verify(spark, streams, sample=sample, seed=seed, partitions=options.partitions, **where)
    if as_json:
        print_json(verified_document(report))
    else:
        print_verified(report)
    exit_with(report, streams)


@app.command()
@spread
def resolve(
    places: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A .parquet, .csv (with a header) or .jsonl with the columns stream and offset, or a URL of such.",
            show_default=False,
        ),
    ],
    *,
    value: Annotated[bool, typer.Option("--value/--no-value", help="With the bodies.")] = True,
    headers: Annotated[bool, typer.Option("--headers/--no-headers", help="With headers and properties.")] = True,
    options: RowOptions,
    servers: BrokerOptions,
) -> None:
    """Read the messages at the places that a file names, and say of each whether it is there.

    A row has the file's columns and timestamp, value, headers, properties and status.
    """
    broker = servers.broker_url
    rows_of = _job().places_of(places)
    _job().show(
        options,
        lambda spark: relatum_spark.resolve(
            rows_of(spark),
            value=value,
            headers=headers,
            partitions=options.partitions,
            broker=broker,
            stream_url=servers.stream_url,
        ),
        with_payloads=value or headers,
    )


@app.command()
@spread
def pairs(
    left: LeftArgument,
    right: RightArgument,
    on: OnOption,
    *,
    spans: SpanOptions,
    payloads: PayloadsOption = False,
    options: RowOptions,
    servers: ServerOptions,
) -> None:
    """Pair the messages of two streams that share a key's value.

    A row has value, left_stream, left_offset, left_time, right_stream, right_offset, right_time; with --payloads also
    left_value, left_headers, left_properties, left_status and the same of right.
    """
    sides: dict[str, Any] = {"left": parse_names(left), "right": parse_names(right), "on": _keys(on)}
    where = _where(servers)
    _job().show(
        options,
        lambda spark: relatum_spark.related_pairs(
            spark, **sides, **asdict(spans), payloads=payloads, partitions=options.partitions, **where
        ),
        with_payloads=payloads,
    )


@app.command()
@spread
def as_of(
    left: LeftArgument,
    right: RightArgument,
    *,
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--on",
            metavar="KEY",
            help="Equal in this key; repeatable. Left out: by time alone, read from the streams.",
            show_default=False,
        ),
    ] = None,
    direction: Annotated[Direction, typer.Option(help="Which message of RIGHT.")] = Direction.BACKWARD,
    tolerance: Annotated[float | None, span_option("--tolerance", "At most so far apart in time.")] = None,
    exact: Annotated[bool, typer.Option("--exact/--no-exact", help="Whether the same time matches.")] = True,
    payloads: PayloadsOption = False,
    options: RowOptions,
    servers: ServerOptions,
) -> None:
    """Find for each message of LEFT the one of RIGHT nearest in time, among those of the same key's value.

    A row is as those of `pairs`; the columns of the right message are empty where there is none.
    """
    sides: dict[str, Any] = {"left": parse_names(left), "right": parse_names(right), "on": _keys(on) if on else None}
    where = _where(servers)
    _job().show(
        options,
        lambda spark: relatum_spark.as_of(
            spark,
            **sides,
            direction=direction.value,
            tolerance=tolerance,
            allow_exact_matches=exact,
            payloads=payloads,
            partitions=options.partitions,
            **where,
        ),
        with_payloads=payloads,
    )


@app.command()
@spread
def unmatched(
    left: LeftArgument,
    right: RightArgument,
    on: OnOption,
    *,
    older_than: Annotated[float | None, span_option("--older-than", "Only messages at least so old.")] = None,
    spans: SpanOptions,
    payloads: PayloadsOption = False,
    options: RowOptions,
    servers: ServerOptions,
) -> None:
    """Find the messages of LEFT that have none in RIGHT with an equal value of the key.

    A row has value, left_stream, left_offset, left_time, status: absent, or not_recorded_yet where there may be one.
    """
    sides: dict[str, Any] = {"left": parse_names(left), "right": parse_names(right), "on": _keys(on)}
    where = _where(servers)
    _job().show(
        options,
        lambda spark: relatum_spark.unmatched(
            spark,
            **sides,
            older_than=older_than,
            **asdict(spans),
            payloads=payloads,
            partitions=options.partitions,
            **where,
        ),
        with_payloads=payloads,
    )


@app.command()
@spread
def conversations(
    keys: Annotated[list[str], typer.Argument(metavar="KEY…", help="Keys that connect messages.", show_default=False)],
    *,
    streams: Annotated[
        list[str] | None,
        typer.Option(
            "--streams",
            "-s",
            metavar="STREAM",
            help="Of this stream or super stream; repeatable. All recorded ones where left out.",
            show_default=False,
        ),
    ] = None,
    max_value_size: Annotated[
        int | None,
        typer.Option(help="A value that more messages carry connects none of them.", min=1, show_default=False),
    ] = None,
    members: Annotated[bool, typer.Option("--members", help="A row for each message.")] = False,
    options: RowOptions,
    servers: ServerOptions,
) -> None:
    """Find messages connected with each other over equal values of several keys, step by step.

    The broker only names the streams' virtual host, `/` without it.
    """
    where: dict[str, Any] = {
        "broker": servers.broker or None,
        "stream_url": servers.stream_url,
        "database": servers.database_url,
    }
    _job().show(
        options,
        lambda spark: relatum_spark.conversations(
            spark,
            keys,
            streams=streams or None,
            max_value_size=max_value_size,
            members=members,
            partitions=options.partitions,
            **where,
        ),
    )


def _where(servers: ServerOptions) -> dict[str, Any]:
    """Where RabbitMQ and PostgreSQL are.

    Raises:
        ConfigurationError: one is not named.
    """
    return {"broker": servers.broker_url, "stream_url": servers.stream_url, "database": servers.database_url}


def _keys(on: list[str]) -> str | list[str]:
    """One key by its name: its values then are text; several as a list."""
    return on[0] if len(on) == 1 else on


def _job() -> Any:
    """What carries out a command.

    Raises:
        ConfigurationError: PySpark is not installed.
    """
    _ = relatum_spark.register  # says so if it is not
    from relatum_spark.command import _job

    return _job
