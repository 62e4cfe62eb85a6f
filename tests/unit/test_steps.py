"""One rule for steps: what is raised where, and what is closed when. What tasks alone can do, by the asyncio driver."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from relatum.contexts.steps import Request, async_run, run

_Result = TypeVar("_Result")
Steps = Generator[Request[Any], Any, _Result]


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


def contexts_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those during which it was raised."""
    while error is not None:
        yield error
        error = error.__context__


# --- errors -----------------------------------------------------------------------------------------------


def test_an_error_is_raised_where_it_was_asked_for() -> None:
    """Steps catch what a request meets as they would catch it of a call, also amid another error, and go on."""

    def steps() -> Steps[list[Any]]:
        met: list[Any] = []
        for name in ("a", "b"):
            try:
                yield from Fail(Oops(name))
            except Oops as error:
                met.append(str(error))
                try:
                    yield from Fail(Oops(name.upper()))
                except Oops as second:
                    met.append(str(second))
        return [*met, (yield from Double(4))]

    assert run(steps(), perform) == ["a", "A", "b", "B", 8]


def test_an_error_that_nobody_catches_is_the_callers() -> None:
    """It is the very error, and its traceback leads through the line that asked."""
    met = Oops("nobody's")

    def who_asks() -> Steps[None]:
        yield from Fail(met)

    with pytest.raises(Oops) as caught:
        run(who_asks(), perform)
    assert caught.value is met
    assert "who_asks" in [entry.name for entry in caught.traceback]


def test_a_handled_error_is_not_named_by_the_next() -> None:
    """An error that was dealt with has no part in what goes wrong later."""

    def steps() -> Steps[None]:
        with contextlib.suppress(Oops):
            yield from Fail(Oops("dealt with"))
        raise Oops("later")

    with pytest.raises(Oops, match="later") as caught:
        run(steps(), perform)
    assert caught.value.__context__ is None


def test_a_stray_end_of_iteration_is_a_defect() -> None:
    """A performer that runs over the end of an iterator does not end the steps as if they had returned."""

    def steps() -> Steps[str]:
        yield from Fail(StopIteration("not the result"))
        return "the result"

    def performing(request: Any) -> Any:
        raise request.error

    with pytest.raises(RuntimeError) as caught:
        run(steps(), performing)
    assert "StopIteration" in [type(error).__name__ for error in contexts_of(caught.value)]


def test_no_error_lives_on() -> None:
    """What was raised goes when the caller lets go of it, with all that its frames hold."""

    def asking() -> Steps[int]:
        return (yield from Double(1))

    def failing(_: Any) -> None:
        raise Oops("let go")

    def call() -> "weakref.ref[BaseException]":
        try:
            run(asking(), failing)
        except Oops as error:
            return weakref.ref(error)
        raise AssertionError("it failed")

    gc.collect()
    gc.disable()  # Nothing goes that is still referred to, be it by itself.
    try:
        assert call()() is None
    finally:
        gc.enable()


# --- what ends the driver ---------------------------------------------------------------------------------


class Stop(BaseException):
    """As Ctrl-C is: no `Exception`, and nobody's to handle on the way."""


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_interruption_closes_the_steps(goes_on: bool) -> None:
    """What is no `Exception` is not the steps' to handle: their `finally` runs, and the caller gets it."""
    log: list[str] = []

    def steps() -> Steps[str]:
        with noting(log, "steps"):
            try:
                yield from Fail(Stop())
            except BaseException as error:
                if isinstance(error, Exception) or not goes_on:
                    raise
        return "all is well"

    with pytest.raises(Stop):
        run(steps(), perform)
    assert log == ["steps" if goes_on else "steps: GeneratorExit"]


def test_asking_while_closed_is_a_defect() -> None:
    """Nobody performs what steps ask for in a `finally` while they are closed."""

    def steps() -> Steps[None]:
        try:
            yield from Fail(Stop())
        finally:
            yield from Double(1)

    with pytest.raises(RuntimeError, match="ignored GeneratorExit") as caught:
        run(steps(), perform)
    assert "Stop" in [type(error).__name__ for error in contexts_of(caught.value)]


def test_a_finally_may_ask_where_an_error_was_met() -> None:
    """After an error of a request the steps still run: their `finally` is performed like all else."""
    asked: list[int] = []

    def steps() -> Steps[None]:
        try:
            yield from Fail(Oops())
        finally:
            asked.append((yield from Double(21)))

    with pytest.raises(Oops):
        run(steps(), perform)
    assert asked == [42]


# --- asyncio alone ----------------------------------------------------------------------------------------


def patient(log: list[str]) -> Steps[str]:
    """Ask for what takes long, and note how it ended."""
    with noting(log, "steps"):
        try:
            yield from Double(1)
        except TimeoutError:
            return "out of time"
    return "answered"


def waiting(log: list[str], started: asyncio.Event, limit_s: float | None = None) -> Callable[[Any], Any]:
    """A performer that never answers, by itself or within a limit of its own."""

    async def performing(_: Any) -> None:
        with noting(log, "performer"):
            started.set()
            async with asyncio.timeout(limit_s):
                await asyncio.Event().wait()

    return performing


@pytest.mark.parametrize("how", ["cancelled", "a limit around it"])
async def test_who_is_stopped_from_outside_closes_the_steps(how: str) -> None:
    """First what performs lets go, then the steps are closed where they stand: they are not asked."""
    log: list[str] = []
    started = asyncio.Event()

    async def limited() -> None:
        async with asyncio.timeout(0 if how == "a limit around it" else None):
            await async_run(patient(log), waiting(log, started))

    task = asyncio.create_task(limited())
    await started.wait()
    if how == "cancelled":
        task.cancel()
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else TimeoutError):
        await task
    assert log == ["performer: CancelledError", "steps: GeneratorExit"]


async def test_a_limit_of_the_performer_is_an_error_in_the_steps() -> None:
    """A request that ran out of its own time is answered by an error that the steps may handle."""
    log: list[str] = []
    assert await async_run(patient(log), waiting(log, asyncio.Event(), limit_s=0)) == "out of time"
    assert log == ["performer: TimeoutError", "steps"]
