"""`relatum tap` and `relatum untap`: copy each message of an exchange into a stream."""

from typing import Any, Final

import typer

from relatum.checks import size_text
from relatum.documents import document
from relatum.superstreams.connections import KEPT
from relatum.tapping import Tap, defined_taps
from relatum.tapping import tap as run_tap
from relatum.tapping import untap as run_untap
from relatum_cli.options import CommandOptions, argument, option
from relatum_cli.show import Cells, print_json, say, show
from relatum_cli.super_stream import StreamSettings

_COLUMNS: Final[Cells] = {
    "exchange": "exchange",
    "type": "kind",
    "stream": "stream",
    "binding key": "binding_key",
    "since": "created_at",
}


def tap(
    *,
    exchanges: list[str] | None = argument("Existing exchanges.", "EXCHANGE…", default=None),
    stream: str | None = option(None, "The stream for all of them; tap.EXCHANGE for each by default.", metavar="NAME"),
    binding_keys: list[str] | None = option(None, "What to copy; all by default.", "--binding-key", metavar="KEY"),
    show_list: bool = option(False, "Show the taps, and change nothing.", "--list"),
    settings: StreamSettings,
    given: CommandOptions,
) -> None:
    """Copy each message of exchanges into a stream; publishers do not change.

    A missing stream is declared, and keeps at most 5 GB and 7 days. `relatum record` records it like any other. The
    default exchange cannot be tapped: nothing can be bound to it.

    `--json` prints one document: a list of exchange, type, stream, binding_key, created_at.
    """
    options = settings.over(KEPT)
    if show_list:
        taps = defined_taps(given.database_url, vhost=given.vhost)
    elif exchanges:
        taps = run_tap(
            given.broker,
            given.database_url,
            exchanges,
            stream=stream,
            binding_keys=binding_keys or (),
            options=options,
        )
    else:
        raise typer.BadParameter("give an EXCHANGE, or --list")
    empty = "No exchange is tapped."
    show(taps, _COLUMNS, as_json=given.as_json, document_of=_document, whole=("since",), empty=empty)
    if show_list or given.as_json:
        return
    if any(each.kind is None for each in taps):
        say(
            "This user may not read an exchange's type. No key binds all messages of a direct exchange: only those "
            "with a --binding-key are copied."
        )
    limits = f"{size_text(options.max_length_bytes)} and {settings.max_age or '7d'}"
    say(f"A new stream keeps at most {limits} on each node: --max-length-bytes, --max-age.")
    say(f"Record it: relatum record {' '.join(dict.fromkeys(each.stream for each in taps))}")


def untap(
    *,
    exchanges: list[str] = argument("Exchanges that are tapped.", "EXCHANGE…"),
    stream: str | None = option(None, "Only taps into this stream.", metavar="NAME"),
    given: CommandOptions,
) -> None:
    """Stop copying exchanges. Streams and recorded rows stay.

    `relatum forget` deletes what was recorded of a stream that you have deleted.

    `--json` prints one document, as `tap` does.
    """
    gone = run_untap(given.broker, given.database_url, exchanges, stream=stream)
    if given.as_json:
        print_json([_document(each) for each in gone])
        return
    for each in gone:
        say(f"{each.exchange} is no longer tapped; the copies stay in {each.stream}.")


def _document(tap: Tap) -> dict[str, Any]:
    return {"type" if name == "kind" else name: value for name, value in document(tap).items()}
