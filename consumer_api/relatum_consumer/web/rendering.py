"""Templates and responses: the only place that makes HTML, and it always escapes."""

import hashlib
import json
import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, Final

import jinja2
from jinja2.runtime import Context
from markupsafe import Markup
from starlette.responses import Response
from starlette.types import Scope

from relatum.checks import size_text
from relatum.keys import KeyDefinition
from relatum.recording import StreamStatus
from relatum_consumer.traces import Tree
from relatum_consumer.web.bodies import hex_lines, indented
from relatum_consumer.web.coverage_bar import CoveragePiece, coverage_bar
from relatum_consumer.web.links import FOR_PROGRAMS, Links
from relatum_consumer.web.masking import Masking
from relatum_consumer.web.messages import KeyValue
from relatum_consumer.web.problems import Problem

HUES: Final = 8
"""How many colours keys have, each with a letter."""

_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))

TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def static_files() -> dict[str, tuple[bytes, str]]:
    """Load the static files: content and media type by name. They are small, and stay in memory."""
    found = files(__package__).joinpath("static").iterdir()
    kinds = ((file, TYPES.get(file.name.rpartition(".")[2])) for file in found)
    return {file.name: (file.read_bytes(), kind) for file, kind in kinds if kind}


def version_of(static: Mapping[str, tuple[bytes, str]]) -> str:
    """Return a hash of all static files, which changes when one of them does."""
    return hashlib.sha256(repr(sorted(static.items())).encode()).hexdigest()[:16]


class Rendering:
    """Makes responses from templates, values and problems.

    Args:
        links: The paths of the page.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(str(files(__package__).joinpath("templates"))),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.globals |= {
            "links": links,
            "masking": None,
            "problem": None,
            "page": "",
            "known": (),
            "servers": None,
        }
        self._environment.filters |= {
            "bar": _bar,
            "commands": _commands,
            "count": lambda value: f"{value:,}",
            "followed": _followed,
            "hex_lines": lambda part: hex_lines(bytes.fromhex(part)),
            "hue": _hue,
            "is_masked": _is_masked,
            "key_value": KeyValue,
            "indented": indented,
            "size": size_text,
            "span": span_text,
            "tree": lambda answer: Tree(answer.messages, answer.hops, answer.edges, answer.shared),
            "typed_time": lambda moment: f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%S}",
            "utc": _utc,
            "visible": _isolated,
            "visible_only": visible,
        }

    def page(
        self, template: str, values: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Return an HTML response."""
        text = self._environment.get_template(template).render(values)
        return Response(text, status, dict(headers or {}), "text/html; charset=utf-8")

    def problem(self, problem: Problem, scope: Scope) -> Response:
        """Return the response for a problem: a page, or JSON for programs."""
        if scope["path"].startswith(FOR_PROGRAMS):
            said = {"code": problem.code, "message": problem.message, "hint": problem.hint}
            return self.json({"error": said}, problem.status, problem.headers)
        return self.page("problem.html", {"problem": problem}, status=problem.status, headers=problem.headers)

    def json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
        """Return a JSON response."""
        text = json.dumps(value, ensure_ascii=False)
        return Response(text.encode("utf-8", "replace"), status, dict(headers or {}), "application/json")


# --- filters ----------------------------------------------------------------------------------------------


@jinja2.pass_context
def _hue(context: Context, key: str) -> int:
    """Return the index of a key's colour and letter, which adding or removing other keys does not change."""
    definition = _definition(context, key)
    return 0 if definition is None else (definition.key_id - 1) % HUES


@jinja2.pass_context
def _is_masked(context: Context, key: str) -> bool:
    """Whether a key's values are digests; a removed key may have been masked, so it counts as masked."""
    definition = _definition(context, key)
    return definition is None or context["masking"].is_masked(definition)


def _definition(context: Context, key: str) -> KeyDefinition | None:
    masking: Masking | None = context["masking"]
    return None if masking is None else masking.definitions.get(key)


@jinja2.pass_context
def _followed(context: Context, each: Any, place: Any = None) -> str:
    """Return the URL of a search for a key's value: by the value, or by its message if it is masked or composite."""
    links: Links = context["links"]
    definition = _definition(context, each.key)
    if definition is None:
        return ""
    if not _is_masked(context, each.key) and not definition.is_composite:
        return links.search(key=each.key, value=each.value)
    if place is None:
        return ""
    of_value = getattr(each, "of_value", 0)
    return links.search(key=each.key, of_stream=place.stream, of_offset=place.offset, of_value=of_value or None)


def _bar(found: StreamStatus, key: str = "") -> tuple[CoveragePiece, ...]:
    """Return the coverage of a stream by all keys, or by one; nothing while the stream's ends are unknown."""
    if found.first is None or found.last is None:
        return ()
    covered = {key: found.covered[key]} if key else found.covered
    return coverage_bar((found.first, found.last + 1), covered, found.holes)


def visible(text: str) -> str:
    """Return text for one line: invisible characters, and those that reverse text, appear as their numbers."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == " " else f"⟨{ord(each):x}⟩" for each in text)


def _isolated(text: str) -> str:
    """Return text for one line of HTML: right-to-left text does not reorder the text beside it."""
    shown = visible(text)
    if shown.isascii() or not any(unicodedata.bidirectional(each) in ("R", "AL", "AN") for each in shown):
        return shown
    return Markup("<bdi>{}</bdi>").format(shown)


def _commands(text: str) -> Markup:
    """Return our own text as HTML, with the commands between backticks as code."""
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
