"""Templates and responses: only this module makes HTML, and it always escapes."""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from itertools import pairwise
from typing import Any, Final, Literal

import jinja2
from markupsafe import Markup
from starlette.responses import Response
from starlette.types import Scope

from relatum.common.checks import size_text
from relatum.recording import StreamStatus
from relatum.store.coverage import Range
from relatum_consumer.traces import Tree
from relatum_consumer.web.messages import KeyValue, hex_lines, indented
from relatum_consumer.web.problems import Problem
from relatum_consumer.web.site import PROGRAM_PATHS, Links

_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))

TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def static_files() -> dict[str, tuple[bytes, str]]:
    """Load the static files: content and media type by name. They are small, and stay in memory."""
    found = files(__package__).joinpath("static").iterdir()
    kinds = ((file, TYPES.get(file.name.rpartition(".")[2])) for file in found)
    return {file.name: (file.read_bytes(), kind) for file, kind in kinds if kind}


class Rendering:
    """Makes responses from templates, values and problems."""

    def __init__(self, links: Links) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(str(files(__package__).joinpath("templates"))),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.globals |= {"links": links, "problem": None, "page": "", "facts": (), "site": None}
        self._environment.filters |= {
            "bar": bar_of,
            "commands": _commands,
            "count": lambda value: f"{value:,}",
            "hex_lines": lambda part: hex_lines(bytes.fromhex(part)),
            "key_value": KeyValue,
            "indented": indented,
            "size": size_text,
            "span": span_text,
            "tree": lambda answer: Tree(answer.messages, answer.hops, answer.edges, answer.shared),
            "form_time": lambda moment: f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%S}",
            "utc": _utc,
            "visible": _isolated,
            "visible_only": visible,
        }

    def page(self, template: str, values: Mapping[str, Any], failure: Problem | None) -> Response:
        """Return the response with a page; its status is that of the failure, if there is one."""
        text = self._environment.get_template(template).render(values)
        status, headers = (failure.status, dict(failure.headers)) if failure else (200, {})
        return Response(text, status, headers, "text/html; charset=utf-8")

    def problem(self, problem: Problem, scope: Scope) -> Response:
        """Return the response for a problem: a page, or JSON for programs."""
        if scope["path"].startswith(PROGRAM_PATHS):
            content = {"code": problem.code, "message": problem.message, "hint": problem.hint}
            return self.json({"error": content}, problem.status, problem.headers)
        return self.page("problem.html", {"problem": problem}, problem)

    def json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
        text = json.dumps(value, ensure_ascii=False)
        return Response(text.encode("utf-8", "replace"), status, dict(headers or {}), "application/json")


# --- coverage as a bar ------------------------------------------------------------------------------------

PieceKind = Literal["recorded", "partly", "hole", "unrecorded"]

_KIND_PRECEDENCE: Final[tuple[PieceKind, ...]] = ("hole", "unrecorded", "partly", "recorded")
"""The kinds, worst first. Worse pieces are drawn later, over others, since pieces of minimum width overlap."""

PIECES_MAX: Final = 200
"""Maximum pieces of a bar. If there are more, the bar is cut evenly, and each piece shows the worst kind in it."""

_WIDTH_MIN: Final = 0.6
"""Minimum width of a piece, in per cent of the bar, so that it is visible."""


@dataclass(frozen=True, slots=True)
class CoveragePiece:
    """A part of a bar: offsets [start, end), and its position and width, in per cent of the bar."""

    kind: PieceKind
    start: int
    end: int
    x: float
    width: float


def coverage_bar(
    within: Range, covered: Mapping[str, Sequence[Range]], holes: Sequence[Range]
) -> tuple[CoveragePiece, ...]:
    """Return the pieces of a bar for the offsets that a stream retains, in the order of drawing.

    A piece is `recorded` if all keys cover it, `partly` if some do. `holes` were dropped before they were recorded.
    """
    first, end = within
    if end <= first:
        return ()
    edges = (edge for ranges in (*covered.values(), holes) for each in ranges for edge in each)
    cuts = sorted({first, end, *(edge for edge in edges if first < edge < end)})
    if len(cuts) > PIECES_MAX:
        count = min(PIECES_MAX, end - first)
        cuts = [first + (end - first) * n // count for n in range(count + 1)]
    pieces: list[tuple[PieceKind, int, int]] = []
    for start, stop in pairwise(cuts):
        kind = _worst(start, stop, covered, holes)
        piece_start = pieces.pop()[1] if pieces and pieces[-1][0] == kind else start
        pieces.append((kind, piece_start, stop))
    pieces.sort(key=lambda piece: (-_KIND_PRECEDENCE.index(piece[0]), piece[1]))
    return tuple(_piece(within, *piece) for piece in pieces)


def _worst(start: int, end: int, covered: Mapping[str, Sequence[Range]], holes: Sequence[Range]) -> PieceKind:
    if any(a < end and start < b for a, b in holes):
        return "hole"
    whole = sum(any(a <= start and end <= b for a, b in ranges) for ranges in covered.values())
    if not whole:
        return "unrecorded"
    return "recorded" if whole == len(covered) else "partly"


def _piece(within: Range, kind: PieceKind, start: int, end: int) -> CoveragePiece:
    scale = 100.0 / (within[1] - within[0])
    x, width = (start - within[0]) * scale, (end - start) * scale
    if width < _WIDTH_MIN:
        x, width = min(x, 100.0 - _WIDTH_MIN), _WIDTH_MIN
    return CoveragePiece(kind, start, end, round(x, 3), round(width, 3))


# --- filters ----------------------------------------------------------------------------------------------


def bar_of(found: StreamStatus, key: str = "") -> tuple[CoveragePiece, ...]:
    """Return the coverage of a stream by all keys, or by one key; empty while the stream's ends are unknown."""
    if found.first is None or found.last is None:
        return ()
    covered = {key: found.covered[key]} if key else found.covered
    return coverage_bar((found.first, found.last + 1), covered, found.holes)


def visible(text: str) -> str:
    """Return text for one line: invisible characters, and those that reverse text, appear as code points."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == " " else f"⟨{ord(each):x}⟩" for each in text)


def _isolated(text: str) -> str:
    """Return text for one line of HTML: right-to-left text does not reorder the text around it."""
    shown = visible(text)
    if shown.isascii() or not any(unicodedata.bidirectional(each) in ("R", "AL", "AN") for each in shown):
        return shown
    return Markup("<bdi>{}</bdi>").format(shown)


def _commands(text: str) -> Markup:
    """Return a message or hint as HTML, with the commands between backticks as code."""
    code, plain = Markup("<code>{}</code>"), Markup("{}")
    parts = enumerate(text.split("`"))
    return Markup("").join((code if number % 2 else plain).format(_isolated(part)) for number, part in parts)


def _utc(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(sep=" ", timespec="milliseconds")[:23].removesuffix(".000")


def span_text(seconds: float) -> str:
    """Return a span of time in its two largest units: "3 d 4 h", "2 min 5 s", "1.25 s", "0.4 ms", "0 s"."""
    if seconds < 0:
        return f"−{span_text(-seconds)}"
    for (size, unit), (less, smaller) in zip(_UNITS, (*_UNITS[1:], (1, "s")), strict=True):
        whole = round(seconds / less) * less
        if whole >= size:
            rest = whole % size // less
            return f"{whole // size:,} {unit}" + (f" {rest} {smaller}" if rest else "")
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1000 * seconds:.3g} ms" if seconds else "0 s"
