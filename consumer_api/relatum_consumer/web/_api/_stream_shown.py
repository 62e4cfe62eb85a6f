"""What is said of a stream, in the list of all and on its own page."""

from dataclasses import dataclass
from typing import Final

from relatum.recording import CoveragePiece, StreamStatus, coverage_bar
from relatum_consumer.web._site import Site

_WORDS: Final = {
    "recording": "recording: a recorder follows it",
    "unattended": "unattended: a part is not recorded, and nobody records it now",
    "not_recorded": "not recorded yet",
    "complete": "complete, no recorder now",
    "missing": "missing: the broker has no such stream",
    "deleted": "deleted: the broker does not have it any more",
    "not_a_stream": "not a stream: the name is another kind of queue",
    "refused": "refused: the page's user may not read it",
    "unavailable": "unavailable for now",
    "unreadable": "unreadable",
}


@dataclass(frozen=True, slots=True)
class StreamRow:
    """A stream: what the broker holds, and what is recorded of it.

    `rate_per_s` is how many messages a second came in the last minute that somebody looked; None where nobody looked
    before. Of what the broker holds and nobody records now, `state` is `complete` where all is recorded, else
    `unattended`. `recorded_to` is the offset behind the last that is recorded. `bar` draws the coverage of what is
    retained, all keys together; `holes` and `gaps` are ranges [from, to).
    """

    stream: str
    href: str
    super_stream: str | None
    state: str
    words: str
    error: str
    first: int | None
    last: int | None
    recorded_to: int | None
    rate_per_s: float | None
    lag_offsets: int | None
    lag_s: float | None
    rows: int
    bytes: int
    recorder: str | None
    bar: tuple[CoveragePiece, ...]
    holes: tuple[tuple[int, int], ...]
    gaps: tuple[tuple[int, int], ...]


def stream_row(site: Site, found: StreamStatus) -> StreamRow:
    """What is said of one."""
    bar: tuple[CoveragePiece, ...] = ()
    if found.first is not None and found.last is not None:
        bar = coverage_bar((found.first, found.last + 1), found.covered, found.holes)
    is_whole = found.lag_offsets == 0 and all(piece.kind in ("recorded", "hole") for piece in bar)
    state = "complete" if found.state == "unattended" and is_whole else found.state
    return StreamRow(
        stream=found.stream,
        href=site.links.stream(found.stream),
        super_stream=found.super_stream,
        state=state,
        words=_WORDS.get(state, state),
        error="" if found.error is None else str(found.error),
        first=found.first,
        last=found.last,
        recorded_to=found.recorded_to,
        rate_per_s=site.rates.of(found.stream, found.last),
        lag_offsets=found.lag_offsets,
        lag_s=found.lag_s,
        rows=found.rows,
        bytes=found.bytes,
        recorder=found.recorder,
        bar=bar,
        holes=tuple(found.holes),
        gaps=tuple(found.gaps),
    )
