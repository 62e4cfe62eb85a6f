"""`relatum record`, `backfill`, `verify`, `prune` and `forget`: recording streams."""

from collections import Counter
from typing import Annotated, Any, Final

import typer

from relatum import errors, metrics, recording
from relatum.collecting import forget_finished
from relatum.common.limits import RECORDER_CONNECTIONS_MAX
from relatum.contexts import forget_placements
from relatum.reading import StreamReader, concerns_broker
from relatum.recording import BackfillProgress, BackfillReport, StreamVerified, VerifyReport
from relatum.recording.forgetting import check_free
from relatum.recording.verifying import meant_streams
from relatum_cli.exits import ExitCode, stop_signals
from relatum_cli.logs import LogFormat, LogLevel, set_up_logging
from relatum_cli.options import (
    NOTHING_RECORDED,
    BatchRows,
    CommandOptions,
    ServerOptions,
    StreamNames,
    Yes,
    argument,
    option,
)
from relatum_cli.show import Cells, answer, confirm, counted, note, print_json, progress_bars, say, show

DIFFERENCES_SHOWN: Final = 20
"""Maximum number of differences printed as text for each stream."""

Streams = Annotated[list[str], argument("Streams and super streams.", "STREAM…")]


def record(
    *,
    streams: Streams,
    keys: list[str] | None = option(
        None, "First define this header as a key; repeatable.", "--keys", "-k", metavar="NAME"
    ),
    metrics_port: int = option(0, "Serve Prometheus metrics on this port; 0: no metrics.", min=0, max=65_535),
    metrics_host: str = option("127.0.0.1", "The address on which to serve the metrics."),
    holder: str | None = option(None, "This recorder's name in `relatum status`; by default host and process id."),
    database_connections: int = option(RECORDER_CONNECTIONS_MAX, "Maximum connections to PostgreSQL.", min=1),
    log_format: LogFormat = option("text", "The format of log lines."),
    log_level: LogLevel = option("info", "The lowest level to log."),
    servers: ServerOptions,
) -> None:
    """After either signal, it finishes its current batch and stops. It waits while the broker or the database is
    unavailable. Recorders of the same streams share them: if one dies, the others take over within seconds.
    """
    set_up_logging(log_format, log_level)
    options: dict[str, Any] = {"holder": holder, "database_connections_max": database_connections}
    recorder = recording.Recorder(servers.broker, servers.database_url, streams, keys=keys or (), **options)
    if metrics_port:
        metrics.serve(metrics_port, metrics_host)
    with stop_signals() as stop:
        recorder.run(stop)


_GENERAL: Final = (errors.ConfigurationError, errors.DatabaseUnavailable, errors.InvalidInput, errors.KeyNotDefined)
"""Errors that other streams would have, too."""


def backfill(
    *,
    streams: StreamNames = None,
    keys: list[str] | None = option(None, "Only this key; repeatable.", "--keys", "-k", metavar="NAME"),
    given: CommandOptions,
) -> None:
    """It reads the streams again. Without names, it skips deleted streams, and continues after a stream that cannot be
    read or was replaced; it then exits with that error's code. `--json` prints one document, a list of the streams:
    stream, messages, rows, from_offset, to_offset, seconds.
    """
    broker, url = given.broker, given.database_url
    with given.engine() as engine, StreamReader.open(broker) as reader:
        targets = meant_streams(engine, reader, broker.vhost, streams or None)
    failed: list[errors.RelatumError] = []
    reports: list[BackfillReport] = []
    with stop_signals() as stop, progress_bars("offsets") as update:

        def on_progress(progress: BackfillProgress) -> None:
            begin = progress.from_offset
            update(progress.stream, progress.at_offset - begin, progress.to_offset - begin)

        for name, super_stream in targets:
            if stop.is_set():
                break
            options: dict[str, Any] = {"super_stream": super_stream, "progress": on_progress, "stop": stop}
            try:
                reports.append(recording.backfill(broker, url, name, keys=keys or None, **options))
            except errors.RelatumError as error:
                is_general = isinstance(error, _GENERAL) and not isinstance(error, errors.AnotherBroker)
                if streams or is_general or concerns_broker(error):
                    raise
                if isinstance(error, errors.StreamNotFound):
                    note(f"{name}: skipped, because the broker no longer has this stream")
                else:
                    failed.append(error)
    columns = {each: each for each in ("stream", "messages", "rows")} | {"seconds": "{0.seconds:.1f}".format}
    show(reports, columns, as_json=given.as_json, empty="" if targets else NOTHING_RECORDED)
    for each in failed[1:]:
        note(str(each))
    if failed:
        raise failed[0]


def verify(
    *,
    streams: StreamNames = None,
    sample: float | None = option(None, "The share of windows (20,000 offsets) to compare, 0 to 1.", min=0, max=1),
    seed: int | None = option(None, "With --sample: the seed of an earlier sample, to compare it again."),
    repair_rows: bool = option(False, "Repair differences by recording again; see --dry-run.", "--repair"),
    dry_run: bool = option(True, "With --repair: only show the repairs, or make them.", "--dry-run/--no-dry-run"),
    given: CommandOptions,
) -> None:
    """It reads the streams: each value of a key must have a row, and each row a message with the value. Exits with code
    7 if they differ, even after a repair: verify again. Exits with 6 if a named stream was never recorded, and with 3
    if you name no stream and none is recorded. A stream that cannot be read is listed and does not stop the others; the
    command then exits with that error's code. `--json` prints one document: ok, exact, seed, streams (each with its
    differences), and with --repair dry_run and repaired (what was or would be done).
    """
    broker, url = given.broker, given.database_url
    report = recording.verify(broker, url, streams or None, sample=sample, seed=seed)
    done = recording.repair(report, url, vhost=broker.vhost, dry_run=dry_run) if repair_rows and not report.ok else None
    if given.as_json:
        shown = {name: getattr(report, name) for name in ("ok", "exact", "seed", "streams", "failed")}
        print_json(shown if done is None else {**shown, "dry_run": dry_run, "repaired": done})
    else:
        _print_verified(report)
        for line in done or ():
            say(f"{'would be done' if dry_run else 'done'}: {line}")
    if any(stream.difference_count for stream in report.streams):
        raise typer.Exit(ExitCode.DIFFERENT)
    for error in report.failed.values():
        raise error
    recorded = {name for each in report.streams if each.is_recorded for name in (each.stream, each.super_stream)}
    if not recorded.issuperset(streams or ()):
        raise typer.Exit(ExitCode.NOT_THERE)


def _print_verified(report: VerifyReport) -> None:
    columns: Cells = {
        "stream": "stream",
        "messages": "messages",
        "rows": "rows",
        "windows": lambda each: f"{each.windows:,} of {each.windows_total:,}",
        "found": _found_text,
    }
    show(report.streams, columns)
    if not report.exact:
        say(f"A sample was compared; --seed {report.seed} compares it again.")
    for stream in report.streams:
        if stream.differences:
            _print_differences(stream)
        for reason in stream.unproven:
            say(f"{stream.stream}: {reason}.")
    for name, error in report.failed.items():
        note(f"{name}: not compared: {error}")


def _found_text(stream: StreamVerified) -> str:
    if stream.difference_count:
        return counted(stream.difference_count, "difference")
    return "no difference" if stream.is_recorded else "never recorded"


def _print_differences(stream: StreamVerified) -> None:
    kinds = Counter(each.kind for each in stream.differences)
    counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
    say(f"{stream.stream}: {counts}")
    columns: Cells = {
        "kind": "kind",
        "table": "table",
        "offset": lambda each: f"{each.offset:,}" + (f" to {each.to_offset - 1:,}" if each.to_offset else ""),
        "key": "key",
        "value": lambda each: each.value or each.detail,
        "time (µs)": lambda each: None if each.time_us is None else str(each.time_us),
    }
    show(stream.differences[:DIFFERENCES_SHOWN], columns)
    if stream.difference_count > DIFFERENCES_SHOWN:
        say(f"and {stream.difference_count - DIFFERENCES_SHOWN:,} more; --json lists up to 1,000 a stream.")


def prune(*, streams: StreamNames = None, batch_rows: BatchRows = 10_000, given: CommandOptions) -> None:
    """It deletes rows in bounded batches. Without names, it also deletes old finished messages of collectors, and
    affinity sets and moves that ended long ago.

    A stream that cannot be read is listed and does not stop the others; the command then exits with that error's code.
    If a name is not recorded, it exits with code 6 and deletes nothing.

    `--json` prints one document: rows deleted by stream; "" counts all other rows, such as those of removed keys.
    """
    report = recording.prune(given.broker, given.database_url, streams or None, batch_rows=batch_rows)
    if not streams:
        with given.engine() as engine:
            forgotten = forget_finished(engine, batch_rows=batch_rows, seconds=None)
            # What another broker retains says nothing about these streams.
            if not any(isinstance(error, errors.AnotherBroker) for error in report.failed.values()):
                forgotten += forget_placements(engine, given.broker, batch_rows=batch_rows)
        if forgotten:
            report.rows[""] += forgotten
    names: Cells = {"stream": lambda row: row[0] or "removed keys, replaced streams, and ended work"}
    columns = {**names, "rows deleted": lambda row: row[1]}
    empty = "Nothing was deleted." if report.failed else "Nothing to delete."
    show(report.rows.items(), columns, as_json=given.as_json, json_value=report.rows, empty=empty)
    for stream, error in report.failed.items():
        note(f"{stream}: not pruned: {error}")
    for error in report.failed.values():
        raise error


def forget(
    *,
    streams: Streams,
    is_confirmed: Yes = False,
    dry_run: bool = option(False, "Only show what would be deleted.", "--dry-run"),
    origin: bool = option(False, "Only forget which broker the streams were recorded from.", "--origin"),
    batch_rows: BatchRows = 10_000,
    given: CommandOptions,
) -> None:
    """Stop the recorders of the streams first. The command asks for confirmation, and deletes in bounded batches; if it
    is killed, run it again. `--broker` is used only for its virtual host. If nothing is recorded for a name it exits
    with code 6, and if a stream is still in use with 7, and deletes nothing. `--dry-run` also shows rows of streams in
    use.

    `--origin` deletes nothing and asks nothing. Use it after a new broker has replaced the old one: the next recorder
    assigns the streams to the new broker, and records streams that differ from their beginning.

    `--json` prints one document, the list of streams with the rows of each table, and what still uses a stream; it
    needs `--yes` or `--dry-run`.
    """
    url, vhost = given.database_url, given.vhost
    if origin and dry_run:
        raise typer.BadParameter("--origin and --dry-run cannot be combined")
    if origin:
        forgotten = recording.forget_origin(url, streams, vhost=vhost)
        answer(forgotten, f"The recorded broker was forgotten for {', '.join(forgotten)}.", as_json=given.as_json)
        return
    if not (is_confirmed or dry_run):
        if given.as_json:
            raise typer.BadParameter("with --json the command cannot ask for confirmation: add --yes, or --dry-run")
        found = recording.forget(url, streams, vhost=vhost, dry_run=True)
        for each in found:
            check_free(each.stream, each.needed)
        rows = sum(each.total for each in found)
        confirm(f"Forget {', '.join(each.stream for each in found)}: about {rows:,} rows?")
    done = recording.forget(url, streams, vhost=vhost, dry_run=dry_run, batch_rows=batch_rows)
    heading = "rows that would be deleted, about" if dry_run else "rows deleted"
    show(done, {"stream": "stream", heading: "total"}, as_json=given.as_json)
    for each in done:
        check_free(each.stream, each.needed)
