"""Lines of stdin that are no requests, and their answers: the SDK is silent, and its client would wait for ever."""

import json
import re
from collections.abc import AsyncIterable, Awaitable, Callable
from io import TextIOWrapper
from typing import BinaryIO, Final

import anyio
from anyio.streams.memory import MemoryObjectSendStream
from mcp import types
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

REQUEST_BYTES_MAX: Final = 256 << 10
"""Bytes of a request; over stdio, characters."""

_TOO_LONG: Final = f"a request has {REQUEST_BYTES_MAX:,} characters at most"
_WORDS: Final = "this is no request in JSON: numbers have 4,300 digits at most, texts are Unicode, and 200 levels do"

_NUMBER: Final = re.compile(r'"id"\s*:\s*(-?\d{1,18}|"[^"\\]{1,100}")')


class _Shortened(TextIOWrapper):
    """Lines of which what is over the most of a request is not kept: the line is no JSON then, and is answered so."""

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        line = rest = super().readline(REQUEST_BYTES_MAX + 1)
        while len(rest) > REQUEST_BYTES_MAX and not rest.endswith("\n"):
            rest = super().readline(REQUEST_BYTES_MAX + 1)
        return line


def shortened_lines(stdin: BinaryIO) -> anyio.AsyncFile[str]:
    """What the SDK reads in place of stdin, of which it would take a line of any length."""
    return anyio.wrap_file(_Shortened(stdin, encoding="utf-8", errors="replace"))


async def pass_on(
    reading: AsyncIterable[SessionMessage | Exception],
    onward: MemoryObjectSendStream[SessionMessage | Exception],
    write: Callable[[SessionMessage], Awaitable[None]],
) -> None:
    """Pass on requests until there are no more, and answer what is none."""
    async with onward:
        async for each in reading:
            if isinstance(each, SessionMessage):
                await onward.send(each)
            elif line := _line_of(each):
                words = _TOO_LONG if len(line) > REQUEST_BYTES_MAX else _WORDS
                error = types.ErrorData(code=types.PARSE_ERROR, message=words)
                await write(SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=_number_in(line), error=error)))


def _line_of(error: Exception) -> str:
    """The line that could not be read; empty where it was, too."""
    given = error.errors()[0]["input"] if isinstance(error, ValidationError) else None
    return given.strip() if isinstance(given, str) else repr(error)


def _number_in(line: str) -> int | str | None:
    """The number of the request, where the line says it once; None where it is not plain."""
    found = _NUMBER.findall(line)
    number: int | str | None = json.loads(found[0]) if len(found) == 1 else None
    return number
