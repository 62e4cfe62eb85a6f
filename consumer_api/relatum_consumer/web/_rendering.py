"""Templates and answers: the one place that makes HTML, and always escapes."""

import hashlib
import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, Final

import jinja2
from markupsafe import Markup
from starlette.responses import Response
from starlette.types import Scope

from relatum.terminal import size_text
from relatum_consumer.web._links import FOR_PROGRAMS, Links
from relatum_consumer.web._problems import Problem
from relatum_consumer.web._spans import span_text

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
        """An answer of JSON: of a dataclass, or of what `json` takes."""
        text = json.dumps(value, ensure_ascii=False, default=_plain)
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


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if is_dataclass(value):
        # Not by `asdict`, which copies all that is within, and takes three times as long.
        return {field.name: getattr(value, field.name) for field in fields(value)}
    raise TypeError(type(value).__name__)
