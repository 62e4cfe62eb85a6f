"""The blocking face of an asyncio source, as text.

`async` and `await` go; `Async…`, `_async_…`, `…_asyncio` and the methods of asyncio's protocols take their blocking
names; what asyncio offers becomes what threads have (`ASYNCIO`); comments and docstrings speak of threads where they
spoke of tasks. Anything of asyncio that has no counterpart is an error, and so is a word ("event loop") that means
nothing in a blocking face: the source says in marked lines what each face does then.

        # asyncio only:
        async with asyncio.timeout(1.0):
            await self._writer.wait_closed()
        # blocking only:
        # self._socket.close()
        # both:

Either part may be left out. Lines for the blocking face alone are comments in the source, and code in its twin.
"""

import io
import keyword
import re
import tokenize
from collections.abc import Iterator, Sequence
from typing import Final

MARKS: Final = re.compile(r"\s*# (asyncio only|blocking only|both):$")
COMMENTED: Final = re.compile(r"^(\s*)#(?: (.*))?$")

ASYNCIO: Final = {
    "Condition": "threading.Condition",
    "Event": "threading.Event",
    "Lock": "threading.Lock",
    "Queue": "queue.Queue",
    "QueueEmpty": "queue.Empty",
    "QueueFull": "queue.Full",
    "Semaphore": "threading.Semaphore",
    "current_task": "threading.current_thread",
    "sleep": "time.sleep",
}
"""What asyncio offers, and what takes its place between threads."""

THREADS: Final = frozenset(name.partition(".")[0] for name in ASYNCIO.values())
"""Modules that a blocking face imports where it uses them."""

IN_THREADS: Final = {"to_thread": 0, "in_thread": 1}
"""Functions that call another one in a thread, and how many arguments come before that one."""

NAMES: Final = {
    "AsyncExitStack": "ExitStack",
    "AsyncGenerator": "Generator",
    "AsyncIterable": "Iterable",
    "AsyncIterator": "Iterator",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "aclose": "close",
    "aclosing": "closing",
    "aiter": "iter",
    "anext": "next",
    "asynccontextmanager": "contextmanager",
    "enter_async_context": "enter_context",
    "push_async_callback": "callback",
}
"""Names that follow none of the rules in `blocking_name`."""

RULES: Final = (
    (re.compile(r"^(_?)Async(?=[A-Z])"), r"\1"),
    (re.compile(r"^(_*)async_(?=[a-z])"), r"\1"),
    (re.compile(r"^test_async_"), "test_"),
    (re.compile(r"_asyncio$"), "_blocking"),
    (re.compile(r"(?<=[a-z])_async$"), ""),
)

WORDS: Final = (
    (re.compile(r"\basync (?=with |for |def )"), ""),
    (re.compile(r"\bawait "), ""),
    (re.compile(r"\b([Aa])n asynchronous "), r"\1 "),
    (re.compile(r"\basynchronous "), ""),
    (re.compile(r"\bAn asyncio "), "A blocking "),
    (re.compile(r"\ban asyncio "), "a blocking "),
    (re.compile(r",? with asyncio\b"), ", blocking"),
    (re.compile(r"(?<!`)\basyncio\b"), "blocking"),  # in backquotes, asyncio itself is meant
    (re.compile(r"\btask(s?)\b"), r"thread\1"),
    (re.compile(r"\bTask(s?)\b"), r"Thread\1"),
)
"""What comments and docstrings say, and what they say of threads."""

NONSENSE: Final = re.compile(r"\b(event loop|coroutine|cancell?ed task)s?\b")


class NoTwin(Exception):
    """No blocking face can be made of a source: it says something of asyncio alone, outside marked lines."""


def blocking_face(source: str) -> str:
    """What a source says of threads, not formatted yet.

    Raises:
        NoTwin: it cannot be said of threads; the error names the line.
    """
    return _Rewriting(_chosen(source)).run()


def blocking_name(name: str) -> str:
    """The name that something of asyncio has in a blocking face."""
    if name in NAMES:
        return NAMES[name]
    for pattern, replacement in RULES:
        name = pattern.sub(replacement, name)
    return name


def blocking_words(text: str) -> str:
    """What a comment or a docstring says, of threads."""
    for pattern, replacement in WORDS:
        text = pattern.sub(replacement, text)
    return re.sub(r"\w+", lambda found: blocking_name(found[0]), text)


def _chosen(source: str) -> str:
    """A source without the lines that are marked for asyncio alone, and with those for the blocking face as code."""
    chosen: list[str] = []
    part = "both"
    for number, line in enumerate(source.splitlines(), 1):
        if marked := MARKS.match(line):
            if marked[1] == "both" == part:
                raise NoTwin(f"line {number}: nothing was marked before {line.strip()!r}")
            part = marked[1]
        elif part == "both":
            chosen.append(line)
        elif part == "blocking only":
            commented = COMMENTED.match(line)
            if not line.strip():
                chosen.append("")
                continue
            if commented is None:
                raise NoTwin(f"line {number}: a line for the blocking face alone is a comment")
            chosen.append(commented[1] + commented[2] if commented[2] else "")
    if part != "both":
        raise NoTwin(f"the lines marked {part!r} have no end: there is no '# both:' behind them")
    return "".join(f"{line}\n" for line in chosen)


class _Rewriting:
    """One source, rewritten token by token: what is not touched stays as it was written."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._tokens = list(_whole_strings(tokenize.generate_tokens(io.StringIO(text).readline), text, self._starts))
        self._closing = _brackets(self._tokens)
        self._edits: list[tuple[int, int, str]] = []
        self._needed: set[str] = set()

    def run(self) -> str:
        at = 0
        while at < len(self._tokens):
            at = self._take(at)
        parts, done = [], 0
        for start, end, new in sorted(self._edits, key=lambda edit: (edit[0], -edit[1])):
            if start < done:
                continue  # It lies in what was cut.
            parts += [self._text[done:start], new]
            done = end
        return _with_imports("".join([*parts, self._text[done:]]), self._needed)

    def _take(self, at: int) -> int:
        """Rewrite what begins at a token; where to go on."""
        token = self._tokens[at]
        if token.type == tokenize.COMMENT or self._is_docstring(at):
            self._say(token, blocking_words(token.string))
        elif token.type == tokenize.STRING:
            # Annotations in quotation marks; what a program says to its users stays.
            self._put(token, re.sub(r"\b_?Async[A-Z]\w*", lambda found: blocking_name(found[0]), token.string))
        elif token.type == tokenize.NAME:
            return self._take_name(at)
        return at + 1

    def _take_name(self, at: int) -> int:
        token = self._tokens[at]
        if token.string in ("async", "await"):
            following = self._tokens[at + 1]
            self._cut(self._start(token), self._start(following))
            if token.string == "await":
                self._unwrap(at)
        elif token.string == "asyncio" and self._string(at + 1) == ".":
            return self._take_asyncio(at)
        elif token.string in THREADS and self._string(at + 1) == ".":
            self._needed.add(token.string)
        elif token.string in IN_THREADS and self._string(at + 1) == "(":
            self._call_here(at, at + 1, IN_THREADS[token.string])
        elif token.string in ("Awaitable", "Coroutine") and self._string(at + 1) == "[":
            self._unwrap_result(at)
        elif token.string == "AsyncGenerator" and self._string(at + 1) == "[":
            end = self._closing[at + 1]
            # A blocking generator returns something, too.
            if len(self._parts(at + 1)) == 2:
                self._edits.append((self._start(self._tokens[end]), self._start(self._tokens[end]), ", None"))
            self._put(token, "Generator")
        else:
            name = blocking_name(token.string)
            if not name.isidentifier() or (keyword.iskeyword(name) and name != token.string):
                raise NoTwin(f"{self._where(token)}: {token.string!r} would be called {name!r}")
            self._put(token, name)
        return at + 1

    def _take_asyncio(self, at: int) -> int:
        name = self._tokens[at + 2]
        if name.string in IN_THREADS and self._string(at + 3) == "(":
            self._call_here(at, at + 3, IN_THREADS[name.string])
            return at + 3
        if name.string not in ASYNCIO:
            raise NoTwin(f"{self._where(name)}: asyncio.{name.string} has no counterpart; mark the line")
        new = ASYNCIO[name.string]
        self._needed.add(new.partition(".")[0])
        self._edits.append((self._start(self._tokens[at]), self._end(name), new))
        return at + 3

    def _call_here(self, at: int, opening: int, before: int) -> None:
        """`to_thread(function, argument)` as `function(argument)`."""
        parts = self._parts(opening)
        if len(parts) <= before:
            raise NoTwin(f"{self._where(self._tokens[at])}: nothing is called in the thread")
        first = self._tokens[parts[before][0]]
        last = self._tokens[parts[before][1]]
        self._cut(self._start(self._tokens[at]), self._start(first))
        if len(parts) > before + 1:
            following = self._tokens[parts[before + 1][0]]
            self._edits.append((self._end(last), self._start(following), "("))
        else:
            closing = self._tokens[self._closing[opening]]
            self._edits.append((self._end(last), self._start(closing), "("))

    def _unwrap(self, at: int) -> None:
        """`(await one.two()).three` as `one.two().three`."""
        before = self._string(at - 2)
        is_call = before in ")]" or (before.isidentifier() and not keyword.iskeyword(before))
        if self._string(at - 1) != "(" or is_call:
            return
        end, each = self._closing[at - 1], at + 1
        if self._string(end + 1) not in (".", "["):
            return
        while each < end:
            if self._string(each) != "." and not self._string(each).isidentifier() and each not in self._closing:
                return
            each = self._closing.get(each, each) + 1
        opening, closing = self._tokens[at - 1], self._tokens[end]
        self._cut(self._start(opening), self._end(opening))
        self._cut(self._start(closing), self._end(closing))

    def _unwrap_result(self, at: int) -> None:
        """`Awaitable[Result]` as `Result`; of `Coroutine[Any, Any, Result]` the last."""
        start, end = self._parts(at + 1)[-1]
        closing = self._tokens[self._closing[at + 1]]
        self._cut(self._start(self._tokens[at]), self._start(self._tokens[start]))
        self._cut(self._end(self._tokens[end]), self._end(closing))

    def _is_docstring(self, at: int) -> bool:
        """Whether a string is a statement of its own."""
        if self._tokens[at].type != tokenize.STRING:
            return False
        quiet = (tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT)
        before = next((each for each in reversed(self._tokens[:at]) if each.type not in quiet), None)
        starts = before is None or before.type in (tokenize.NEWLINE, tokenize.ENCODING)
        return starts and self._tokens[at + 1].type == tokenize.NEWLINE

    def _parts(self, opening: int) -> list[tuple[int, int]]:
        """What lies between commas in brackets: the first and the last token of each."""
        parts: list[tuple[int, int]] = []
        at, first, last = opening + 1, None, opening
        while at <= self._closing[opening]:
            if at == self._closing[opening] or self._string(at) == ",":
                parts += [] if first is None else [(first, last)]
                first = None
            elif self._tokens[at].type not in (tokenize.NL, tokenize.COMMENT):
                first = at if first is None else first
                last = self._closing.get(at, at)
            at = self._closing.get(at, at) + 1
        return parts

    def _string(self, at: int) -> str:
        """What a token says; a blank where it is neither a name nor an operator."""
        token = self._tokens[max(at, 0)]
        return token.string if token.type in (tokenize.OP, tokenize.NAME) else " "

    def _say(self, token: tokenize.TokenInfo, text: str) -> None:
        if nonsense := NONSENSE.search(text):
            raise NoTwin(f"{self._where(token)}: {nonsense[0]!r} means nothing between threads; mark the line")
        self._put(token, text)

    def _put(self, token: tokenize.TokenInfo, text: str) -> None:
        if text != token.string:
            self._edits.append((self._start(token), self._end(token), text))

    def _cut(self, start: int, end: int) -> None:
        self._edits.append((start, end, ""))

    def _start(self, token: tokenize.TokenInfo) -> int:
        return self._starts[token.start[0] - 1] + token.start[1]

    def _end(self, token: tokenize.TokenInfo) -> int:
        return self._starts[token.end[0] - 1] + token.end[1]

    def _where(self, token: tokenize.TokenInfo) -> str:
        return f"at {token.line.strip()!r}"


def _brackets(tokens: Sequence[tokenize.TokenInfo]) -> dict[int, int]:
    """Where each opening bracket is closed."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for at, token in enumerate(tokens):
        if token.type == tokenize.OP and token.string in "([{":
            opened.append(at)
        elif token.type == tokenize.OP and token.string in ")]}":
            closing[opened.pop()] = at
    return closing


def _whole_strings(
    tokens: Iterator[tokenize.TokenInfo], text: str, starts: Sequence[int]
) -> Iterator[tokenize.TokenInfo]:
    """Tokens with each f-string as one, as Python had them before 3.12."""
    begins, ends = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "FSTRING_END", None)
    first: tokenize.TokenInfo | None = None
    depth = 0
    for token in tokens:
        if begins is not None and token.type == begins:
            first = first if depth else token
            depth += 1
        elif begins is not None and token.type == ends:
            depth -= 1
            if not depth and first is not None:
                whole = text[starts[first.start[0] - 1] + first.start[1] : starts[token.end[0] - 1] + token.end[1]]
                yield tokenize.TokenInfo(tokenize.STRING, whole, first.start, token.end, first.line)
        elif not depth:
            yield token


def _with_imports(text: str, modules: set[str]) -> str:
    """A face that imports what took asyncio's place; what is imported twice, or for nothing, is mended later."""
    missing = "".join(f"import {module}\n" for module in sorted(modules))
    return re.sub(r"^(?=import |from )", missing, text, count=1, flags=re.MULTILINE)
