"""Calls of tools: arguments read, the answer made to fit, and an error that says what to do next."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final

import anyio

from relatum import errors
from relatum.checks import seconds_text
from relatum_consumer.web.documents import Schemas, document
from relatum_consumer.web.endpoint import met, problem_met
from relatum_consumer.web.parameters import schema_of, values_given
from relatum_consumer.web.problems import Problem
from relatum_consumer.web.site import Site
from relatum_consumer.web.tools import DATA, TOOLS, Tool

ANSWER_CHARACTERS_MAX: Final = 40_000
"""Characters of an answer: some 12,000 tokens, of the 25,000 that hosts take."""

_CHARACTERS, _ITEMS = 80, 8
"""Characters of a text, and items of a list, to which an answer is cut that is too long even with one message."""

_CHARACTERS_KEPT: Final = 10_000

_WHOLE: Final = frozenset({"next", "stream", "part"})
"""Texts that are of no use in part, or bounded by themselves."""


class _Visible(dict[int, str]):
    """Characters as they are shown, each found out once."""

    def __missing__(self, code: int) -> str:
        if len(self) >= _CHARACTERS_KEPT:
            self.clear()
        character = chr(code)
        is_seen = character.isprintable() or character in "\n\t"
        self[code] = shown = character if is_seen else f"⟨{code:x}⟩"
        return shown


_VISIBLE: Final = _Visible()

_NAMED_MAX: Final = 20
"""Keys or streams that an error offers."""

_PATIENCE: Final = 3.0
"""How many times as long as a look-up a whole call may take: some ask several times."""

_ERROR_CHARACTERS_MAX: Final = 8_000
"""Characters of an error: twenty names of streams, and some."""

_ITEMS_MAX: Final = 200
"""Items of a list of arguments."""

_HINTS: Final[tuple[tuple[type[errors.RelatumError], str], ...]] = (
    (errors.NothingRecorded, "Somebody has to run a recorder: relatum record STREAM."),
    (errors.OffsetNotFound, "Offsets have gaps: the tool `streams` tells a stream's first and last."),
    (errors.AccessRefused, "The user that this server asks as may not read it; who set it up can allow it."),
    (errors.ConfigurationError, "Somebody has to change how this server, or the recorder, is set up."),
    (errors.Transient, "Try again in a moment; if it stays so, tell the person you work for."),
)
"""What is said of an error here; of others, what the page says."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a call came to.

    Attributes:
        text: For who reads: JSON, or the error.
        structured: The same as JSON; None of an error.
    """

    text: str
    structured: dict[str, Any] | None = None


class Calls:
    """Carries out calls of tools.

    Args:
        site: What they ask by.
    """

    def __init__(self, site: Site) -> None:
        self._site = site

    async def call(self, tool: Tool, arguments: Mapping[str, Any]) -> Result:
        """What a tool answers; an error is a result, too."""
        patience_s = _PATIENCE * self._site.options.timeout_s
        try:
            with anyio.fail_after(patience_s):
                return await self._answered(tool, _asked(tool, arguments))
        except TimeoutError:
            return Result(f"took_too_long: no answer within {seconds_text(patience_s)}. Ask for less: {_LESS}")
        except Exception as error:  # noqa: BLE001
            words = _visible(await self._words(problem_met(error), met(error)))
            return Result(words if len(words) <= _ERROR_CHARACTERS_MAX else f"{words[: _ERROR_CHARACTERS_MAX - 1]}…")

    async def _answered(self, tool: Tool, asked: Any) -> Result:
        answer = await tool.answer(self._site, asked)
        shown, cut = document(answer, _visible), ""
        limit = wanted = getattr(asked, "limit", 1)
        while len(_text_of(shown)) > ANSWER_CHARACTERS_MAX and limit > 1:
            fits = int(0.8 * limit * ANSWER_CHARACTERS_MAX / len(_text_of(shown)))
            limit = max(1, min(limit // 2, fits))
            answer = await tool.answer(self._site, replace(asked, limit=limit))
            shown, cut = (
                document(answer, _visible),
                f"With limit={wanted} this was too long: it is cut to limit={limit}. ",
            )
        shown, shorter = _shortened(shown)
        structured = {"notice": DATA, "go_on": _visible(f"{cut}{shorter}{tool.go_on(answer)}"), "answer": shown}
        return Result(_text_of(structured), structured)

    async def _words(self, problem: Problem, error: Exception) -> str:
        """An error, and what to do next."""
        if problem.status == 500 and not isinstance(error, errors.RelatumError):
            return "unexpected: Relatum met what nobody foresaw. The server's log has it: tell the person you work for."
        hint = next((hint for kind, hint in _HINTS if isinstance(error, kind)), problem.hint)
        with suppress(errors.RelatumError):
            if isinstance(error, errors.KeyNotDefined):
                names = [each.name for each in await self._site.keys()]
                hint = _offered("Keys that are defined", names, error.key) if names else "No key is defined."
            elif isinstance(error, errors.StreamNotFound):
                names = list(await self._site.relations.streams())
                hint = _offered("Streams that are recorded", names, error.stream) if names else "No stream is recorded."
        return f"{problem.code}: {problem.message.rstrip('.')}. {hint}"


_LESS: Final = "a narrower span of time, fewer streams, one key, a lower limit."


def _offered(of_what: str, names: list[str], meant: str) -> str:
    """Names that there are, those first that are like what was meant."""
    alike = get_close_matches(meant, names, _NAMED_MAX)
    offered = list(dict.fromkeys([*alike, *names]))
    more = f" and {len(offered) - _NAMED_MAX:,} more" if len(offered) > _NAMED_MAX else ""
    return f"{of_what}: {', '.join(map(repr, offered[:_NAMED_MAX]))}{more}."


def _asked(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    """What is asked, of a call's arguments.

    Raises:
        InvalidInput: one is wrong, missing, or not known.
    """
    fields = tool.fields
    values = values_given(fields, _pairs(arguments))
    for each in fields:
        if each.is_required and values[each.name] in ("", ()):
            raise errors.InvalidInput(f"{each.name} is missing: {each.parameter.description}")
    if tool.limit is not None:
        values.setdefault("limit", tool.limit[0])
    return tool.asked(**values)


def _pairs(arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Arguments as a query has them; null is as if left out."""
    pairs = []
    for name, value in arguments.items():
        items = value if isinstance(value, list) else [value]
        if len(items) > _ITEMS_MAX:
            raise errors.InvalidInput(f"{name} has more than {_ITEMS_MAX} items")
        pairs += [(name, _text(name, each)) for each in items if each is not None]
    return pairs


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict | list):
        raise errors.InvalidInput(f"{name} is a text or a number, or a list of them")
    if isinstance(value, float) and not math.isfinite(value):
        raise errors.InvalidInput(f"{name} is no number of JSON, or too large a one: give it as a text")
    # As JSON writes it: true, 42, and 42 for 42.0.
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def schemas_of(tool: Tool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schemas of what a tool takes, and of what it gives."""
    fields = tool.fields
    takes = {
        "type": "object",
        "properties": {each.name: {**schema_of(each), "description": each.parameter.description} for each in fields},
        "required": [each.name for each in fields if each.is_required],
        "additionalProperties": False,
    }
    schemas = Schemas("#/$defs/")
    answer = schemas.of(tool.gives)
    gives = {
        "type": "object",
        "properties": {
            "notice": {"type": "string", "description": "How the answer is to be taken."},
            "go_on": {"type": "string", "description": "How to have the rest; empty where this is all."},
            "answer": answer,
        },
        "required": ["notice", "go_on", "answer"],
        "additionalProperties": False,
        "$defs": schemas.found,
    }
    return takes, gives


def _visible(text: str) -> str:
    """Text of others: what would not be seen, or turn what follows around, is written as its number."""
    return text if text.isprintable() else text.translate(_VISIBLE)


def _text_of(value: Any) -> str:
    """JSON in a line."""
    return json.dumps(value, ensure_ascii=False)


def _shortened(answer: Any) -> tuple[Any, str]:
    """An answer, its texts and lists cut where it is too long, and what was done to it; empty where it was not."""
    if len(_text_of(answer)) <= ANSWER_CHARACTERS_MAX:
        return answer, ""
    said = f"This was too long: texts were cut to {_CHARACTERS} characters, and lists to {_ITEMS}. "
    return _cut(answer), said


def _cut(value: Any, name: str = "") -> Any:
    if isinstance(value, str):
        return value if name in _WHOLE or len(value) <= _CHARACTERS else f"{value[: _CHARACTERS - 1]}…"
    if isinstance(value, list):
        return [_cut(each) for each in value[:_ITEMS]]
    if isinstance(value, Mapping):
        return {each: _cut(inner, each) for each, inner in value.items()}
    return value


TOOLS_BY_NAME: Final = {each.name: each for each in TOOLS}
