"""Templates and answers: the one place that makes HTML, and always escapes; and tables as files."""

import csv
import hashlib
import io
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, Final

import jinja2
from markupsafe import Markup
from starlette.responses import Response
from starlette.types import Scope

from relatum.terminal import size_text
from relatum_consumer.web.links import FOR_PROGRAMS, Links
from relatum_consumer.web.problems import Problem
from relatum_consumer.web.timeline import span_text

TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the page's own."""

    content: bytes
    media_type: str


def static_files() -> dict[str, StaticFile]:
    """All static files by name; they are small, and kept."""
    found = sorted(files(__package__).joinpath("static").iterdir(), key=lambda file: file.name)
    kinds = {file.name: TYPES.get(file.name.rpartition(".")[2]) for file in found}
    return {file.name: StaticFile(file.read_bytes(), kind) for file in found if (kind := kinds[file.name])}


def version_of(static: Mapping[str, StaticFile]) -> str:
    """A sum over all static files: another one as soon as one of them is another."""
    whole = hashlib.sha256()
    for name, file in static.items():
        whole.update(f"{name}\0{len(file.content)}\0".encode() + file.content)
    return whole.hexdigest()[:16]


class Rendering:
    """Makes answers of templates, of values and of problems.

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
        self._environment.globals |= {"links": links}
        self._environment.filters |= {
            "count": lambda value: f"{value:,}",
            "size": size_text,
            "span": span_text,
            "commands": _commands,
            "utc": _utc,
            "visible": _isolated,
            "visible_only": visible,
        }

    def page(
        self, template: str, values: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> Response:
        """An answer of HTML."""
        text = self._environment.get_template(template).render(
            {"problem": None, "page": "", "known": (), "servers": None, **values}
        )
        return Response(text, status, dict(headers or {}), "text/html; charset=utf-8")

    def problem(self, problem: Problem, scope: Scope) -> Response:
        """The answer to what went wrong: a page, or for programs a document."""
        if scope["path"].startswith(FOR_PROGRAMS):
            said = {"code": problem.code, "message": problem.message, "hint": problem.hint}
            return self.json({"error": said}, problem.status, problem.headers)
        return self.page("problem.html", {"problem": problem}, status=problem.status, headers=problem.headers)

    def json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
        """An answer of JSON."""
        text = json.dumps(value, ensure_ascii=False)
        return Response(text.encode("utf-8", "replace"), status, dict(headers or {}), "application/json")


def visible(text: str) -> str:
    """Text of others in a line: what would not be seen, or turn what follows around, is written as its number."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == " " else f"⟨{ord(each):x}⟩" for each in text)


def _isolated(text: str) -> str:
    """The same where markup may stand: what is written from right to left moves nothing beside it."""
    shown = visible(text)
    if shown.isascii() or not any(unicodedata.bidirectional(each) in ("R", "AL", "AN") for each in shown):
        return shown
    return Markup("<bdi>{}</bdi>").format(shown)


def _commands(text: str) -> Markup:
    """Words of ours, in which commands stand between backticks."""
    code, plain = Markup("<code>{}</code>"), Markup("{}")
    parts = enumerate(text.split("`"))
    return Markup("").join((code if number % 2 else plain).format(_isolated(part)) for number, part in parts)


def _utc(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(sep=" ", timespec="milliseconds")[:23]


_FORMULA: Final = re.compile(r"""(^|[;,\t\r\n])([\s"\ufeff\u200b]*)(?=[=+\-@\uff1d\uff0b\uff0d\uff20])""")
"""Where a cell may begin for a spreadsheet with another separator, which drops quotes, and how a formula begins."""


def csv_text(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as CSV of RFC 4180: numbers as they are, text of which none begins as a formula does."""
    out = io.StringIO()
    writer = csv.writer(out)
    for row in (head, *rows):
        writer.writerow([each if isinstance(each, int) else _harmless(str(each)) for each in row])
    return out.getvalue()


def _harmless(text: str) -> str:
    """Text with an apostrophe before each formula: spreadsheets show it then, and carry out nothing."""
    return _FORMULA.sub(r"\1\2'", text)
