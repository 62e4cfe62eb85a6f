"""Messages on the terminal and as JSON."""

import base64
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from relatum.terminal._output import console, plain_text

if TYPE_CHECKING:
    from relatum.reading import Message, Properties

BODY_CHARACTERS_SHOWN: Final = 80
"""Characters of a body in a table; `--json` and `relatum read` have all of it."""


def _properties(properties: "Properties") -> dict[str, Any]:
    values = {name: getattr(properties, name) for name in properties.__dataclass_fields__}
    return {name: value for name, value in values.items() if value is not None}


def message_document(message: "Message") -> dict[str, Any]:
    """A message for `--json`: a body that is UTF-8 as `body`, any other as `body_base64`."""
    document: dict[str, Any] = {
        "stream": message.stream,
        "offset": message.offset,
        "time": message.time,
        "time_source": message.time_source.value,
        "headers": dict(message.headers),
        "properties": _properties(message.properties),
    }
    try:
        document["body"] = message.body.decode()
    except UnicodeDecodeError:
        document["body_base64"] = base64.b64encode(message.body).decode()
    return document


def _body_text(message: "Message") -> str:
    text = message.body.decode("utf-8", "backslashreplace")
    return text if len(text) <= BODY_CHARACTERS_SHOWN else text[: BODY_CHARACTERS_SHOWN - 1] + "…"


def _headers_text(message: "Message") -> str:
    return "\n".join(f"{name}={value}" for name, value in message.headers.items())


def print_messages(messages: "Iterable[Message]") -> None:
    """Print messages as a table for people; long bodies are cut."""
    table = Table("stream", "offset", "time", "headers", "body")
    for message in messages:
        time = message.time.isoformat(sep=" ") if message.time else "–"
        row = (message.stream, f"{message.offset:,}", time, _headers_text(message), _body_text(message))
        table.add_row(*(plain_text(cell) for cell in row))
    console.print(table)
