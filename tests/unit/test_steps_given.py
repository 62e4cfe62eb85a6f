"""What steps give on the way, by the drivers of `relatum.steps`: they go with the last rooms that have such steps."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from relatum.steps import Request, async_each, each


@dataclass(frozen=True, slots=True)
class Double(Request[int]):
    """Give twice the number."""

    number: int


@dataclass(frozen=True, slots=True)
class Fail(Request[None]):
    """Raise the error."""

    error: BaseException


class Oops(Exception):
    """What a request meets."""


def perform(request: Double | Fail) -> Any:
    """Do what the requests of these tests ask for."""
    if isinstance(request, Fail):
        raise request.error
    return 2 * request.number


def given(steps: Generator[Any, Any, None], most: int = 99) -> list[Any]:
    """What steps give on the way, as many as wanted."""
    with contextlib.closing(each(steps, perform)) as items:
        return list(itertools.islice(items, most))


@contextlib.contextmanager
def noting(log: list[str], name: str) -> Iterator[None]:
    """Note when the block is left, and by what."""
    try:
        yield
    except BaseException as error:
        log.append(f"{name}: {type(error).__name__}")
        raise
    else:
        log.append(name)


def counting(log: list[str]) -> Generator[Double | str | None, Any, None]:
    """Give things between requests."""
    with noting(log, "steps"):
        for number in range(1, 4):
            answer = yield from Double(number)
            yield str(answer)
            yield None


def test_what_is_no_request_is_given() -> None:
    """Anything may be given, None too, in its order; the steps go on when more is wanted."""
    log: list[str] = []
    assert given(counting(log)) == ["2", None, "4", None, "6", None]
    assert log == ["steps"]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_left_early_the_steps_are_closed_where_they_stand(most: int) -> None:
    """Who wants no more need not take the rest."""
    log: list[str] = []
    assert len(given(counting(log), most)) == most
    assert log == ["steps: GeneratorExit"]


def test_giving_steps_meet_errors_where_they_asked() -> None:
    """What was given before an error was right; one that nobody catches is the caller's."""

    def failing(log: list[str]) -> Generator[Fail | str, Any, None]:
        with noting(log, "steps"):
            try:
                yield from Fail(Oops("met"))
            except Oops as error:
                yield str(error)
            yield from Fail(Oops("the end"))

    left: list[str] = []
    assert given(failing(left), 1) == ["met"]
    assert left == ["steps: GeneratorExit"]
    ended: list[str] = []
    with pytest.raises(Oops):
        given(failing(ended))
    assert ended == ["steps: Oops"]


def waiting(log: list[str], started: asyncio.Event, limit_s: float | None = None) -> Callable[[Any], Any]:
    """A performer that never answers, by itself or within a limit of its own."""

    async def performing(_: Any) -> None:
        with noting(log, "performer"):
            started.set()
            async with asyncio.timeout(limit_s):
                await asyncio.Event().wait()

    return performing


async def test_cancelled_between_two_things_that_are_given() -> None:
    """Who is cancelled while it waits for the next thing leaves nothing open."""
    log: list[str] = []
    started = asyncio.Event()

    def steps() -> Generator[Double | str, Any, None]:
        with noting(log, "steps"):
            yield "first"
            yield from Double(1)

    async def take() -> None:
        async with contextlib.aclosing(async_each(steps(), waiting(log, started))) as items:
            log.append(await anext(items))
            log.append(await anext(items))

    task = asyncio.create_task(take())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["first", "performer: CancelledError", "steps: GeneratorExit"]
