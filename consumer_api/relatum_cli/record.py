"""`relatum record`: the recorder as a service."""

from typing import Annotated

import typer

from relatum.limits import RECORDER_CONNECTIONS_MAX
from relatum.terminal import LogFormat, LogLevel, ServerOptions, set_up_logging, spread, stop_signals


@spread
def record(
    streams: Annotated[
        list[str], typer.Argument(metavar="STREAM…", help="Streams and super streams.", show_default=False)
    ],
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--keys",
            "-k",
            metavar="NAME",
            help="Define this key first, from the header of that name.",
            show_default=False,
        ),
    ] = None,
    metrics_port: Annotated[
        int, typer.Option(help="Serve Prometheus metrics on this port; 0 does not.", min=0, max=65535)
    ] = 0,
    metrics_host: Annotated[str, typer.Option(help="The address the metrics are served on.")] = "127.0.0.1",
    holder: Annotated[
        str | None,
        typer.Option(
            help="This recorder's own name in `relatum status`; host and process by default.", show_default=False
        ),
    ] = None,
    database_connections: Annotated[
        int, typer.Option(help="Connections to PostgreSQL at most, whatever the number of streams.", min=1)
    ] = RECORDER_CONNECTIONS_MAX,
    log_format: Annotated[LogFormat, typer.Option(help="How log lines look.")] = LogFormat.TEXT,
    log_level: Annotated[LogLevel, typer.Option(help="From which level on to log.")] = LogLevel.INFO,
    *,
    servers: ServerOptions,
) -> None:
    """Record streams: catch up from the coverage, then follow their tails, until SIGTERM or Ctrl-C.

    Both signals finish the batch at hand. Broker and database may go away and come back. Several recorders of the
    same streams share them: what one has that dies, the others take over within seconds.
    """
    from relatum import metrics
    from relatum.recording import Recorder

    set_up_logging(log_format, log_level)
    recorder = Recorder(
        servers.address,
        servers.database_url,
        streams,
        keys=keys or (),
        holder=holder,
        database_connections_max=database_connections,
    )
    if metrics_port:
        metrics.serve(metrics_port, metrics_host)
    with stop_signals() as stop:
        recorder.run(stop)
