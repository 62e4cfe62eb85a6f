"""One rule for steps, whichever driver takes them: what is raised where, what is closed when, what is given."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from relatum.steps import Request, Steps, async_each, async_run, each, run
from relatum.waiting import left_s, within

Perform = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Double(Request[int]):
    """Give twice the number."""

    number: int


@dataclass(frozen=True, slots=True)
class Fail(Request[None]):
    """Raise the error."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Left(Request[float]):
    """Give the seconds that a wait may take."""


class Oops(Exception):
    """What a request meets."""


def perform(request: Double | Fail | Left) -> Any:
    """Do what the requests of these tests ask for."""
    if isinstance(request, Fail):
        raise request.error
    return left_s() if isinstance(request, Left) else 2 * request.number


class Blocking:
    """The blocking driver."""

    def run(self, steps: Generator[Any, Any, Any], perform: Perform = perform) -> Any:
        """What steps return."""
        return run(steps, perform)

    def each(self, steps: Generator[Any, Any, None], most: int = 99, perform: Perform = perform) -> list[Any]:
        """What steps give, as many as wanted."""
        given: list[Any] = []
        with contextlib.closing(each(steps, perform)) as items:
            for item in items:
                given.append(item)
                if len(given) == most:
                    break
        return given


class Asyncio:
    """The asyncio driver."""

    def run(self, steps: Generator[Any, Any, Any], perform: Perform = perform) -> Any:
        """What steps return."""
        return asyncio.run(async_run(steps, self._performer(perform)))

    def each(self, steps: Generator[Any, Any, None], most: int = 99, perform: Perform = perform) -> list[Any]:
        """What steps give, as many as wanted."""
        return asyncio.run(self._each(steps, most, self._performer(perform)))

    async def _each(self, steps: Generator[Any, Any, None], most: int, perform: Perform) -> list[Any]:
        given: list[Any] = []
        async with contextlib.aclosing(async_each(steps, perform)) as items:
            async for item in items:
                given.append(item)
                if len(given) == most:
                    break
        return given

    @staticmethod
    def _performer(perform: Perform) -> Perform:
        async def performing(request: Any) -> Any:
            await asyncio.sleep(0)
            return perform(request)

        return performing


RUNS = [Blocking(), Asyncio()]
EACH = [Blocking(), Asyncio()]


def _name(driver: Any) -> str:
    return type(driver).__name__


@pytest.fixture(params=RUNS, ids=_name)
def driver(request: pytest.FixtureRequest) -> Any:
    """Each driver that takes steps to their end."""
    return request.param


@pytest.fixture(params=EACH, ids=_name)
def giver(request: pytest.FixtureRequest) -> Any:
    """Each driver that gives what steps give."""
    return request.param


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


# --- answers ----------------------------------------------------------------------------------------------


def test_steps_are_sent_the_answers_and_return(driver: Any) -> None:
    """A request reads like a call, and steps are part of others."""

    def inner(number: int) -> Steps[int]:
        once = yield from Double(number)
        return (yield from Double(once))

    def steps() -> Steps[tuple[int, int]]:
        return (yield from inner(1)), (yield from inner(10))

    assert driver.run(steps()) == (4, 40)


def test_steps_may_ask_for_nothing(driver: Any) -> None:
    """What is known already needs no answer."""

    def steps() -> Steps[str]:
        yield from ()
        return "known"

    assert driver.run(steps()) == "known"


# --- errors -----------------------------------------------------------------------------------------------


def test_an_error_is_raised_where_it_was_asked_for(driver: Any) -> None:
    """Steps catch what a request meets as they would catch it of a call, and go on."""

    def steps() -> Steps[tuple[Exception, int]]:
        try:
            yield from Fail(Oops("first"))
        except Oops as error:
            return error, (yield from Double(4))
        raise AssertionError("the request failed")

    error, answer = driver.run(steps())
    assert (str(error), answer) == ("first", 8)


def test_an_error_that_nobody_catches_is_the_callers(driver: Any) -> None:
    """It is the very error, and its traceback leads through the line that asked."""
    met = Oops("nobody's")

    def who_asks() -> Steps[None]:
        yield from Fail(met)

    with pytest.raises(Oops) as caught:
        driver.run(who_asks())
    assert caught.value is met
    assert "who_asks" in [entry.name for entry in caught.traceback]


def test_one_error_can_follow_another(driver: Any) -> None:
    """Each request has its own error, also while one before it is handled."""

    def steps() -> Steps[list[str]]:
        met = []
        for name in ("a", "b"):
            try:
                yield from Fail(Oops(name))
            except Oops as error:
                met.append(str(error))
                try:
                    yield from Fail(Oops(name.upper()))
                except Oops as second:
                    met.append(str(second))
        return met

    assert driver.run(steps()) == ["a", "A", "b", "B"]


def test_a_handled_error_is_not_named_by_the_next(driver: Any) -> None:
    """An error that was dealt with has no part in what goes wrong later."""

    def steps() -> Steps[None]:
        with contextlib.suppress(Oops):
            yield from Fail(Oops("dealt with"))
        raise Oops("later")

    with pytest.raises(Oops, match="later") as caught:
        driver.run(steps())
    assert caught.value.__context__ is None


def test_a_stray_end_of_iteration_is_a_defect(driver: Any) -> None:
    """A performer that runs over the end of an iterator does not end the steps as if they had returned."""

    def steps() -> Steps[str]:
        yield from Fail(StopIteration("not the result"))
        return "the result"

    def performing(request: Any) -> Any:
        raise request.error

    with pytest.raises(RuntimeError) as caught:
        driver.run(steps(), performing)
    assert "StopIteration" in [type(error).__name__ for error in contexts_of(caught.value)]


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Nothing goes that is still referred to, be it by itself."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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

    with without_collections():
        assert call()() is None


def test_no_error_lives_on_in_a_task() -> None:
    """The same of the asyncio driver."""

    def asking() -> Steps[int]:
        return (yield from Double(1))

    async def failing(_: Any) -> None:
        raise Oops("let go")

    async def call() -> "weakref.ref[BaseException]":
        try:
            await async_run(asking(), failing)
        except Oops as error:
            return weakref.ref(error)
        raise AssertionError("it failed")

    async def is_gone() -> bool:
        return (await call())() is None

    with without_collections():
        assert asyncio.run(is_gone())


# --- what ends the driver ---------------------------------------------------------------------------------


class Stop(BaseException):
    """As Ctrl-C is: no `Exception`, and nobody's to handle on the way."""


def test_an_interruption_closes_the_steps(driver: Any) -> None:
    """What is no `Exception` is not the steps' to handle: their `finally` runs, and the caller gets it."""
    log: list[str] = []

    def steps() -> Steps[None]:
        with noting(log, "steps"):
            try:
                yield from Fail(Stop())
            except Exception:
                log.append("handled")

    with pytest.raises(Stop):
        driver.run(steps())
    assert log == ["steps: GeneratorExit"]


def test_closed_steps_have_no_say(driver: Any) -> None:
    """Steps that would go on, or return something, do not keep the caller from being interrupted."""

    def steps() -> Steps[str]:
        try:
            yield from Fail(Stop())
        except BaseException:
            return "all is well"
        return "never"

    with pytest.raises(Stop):
        driver.run(steps())


def test_asking_while_closed_is_a_defect(driver: Any) -> None:
    """Nobody performs what steps ask for in a `finally` while they are closed."""

    def steps() -> Steps[None]:
        try:
            yield from Fail(Stop())
        finally:
            yield from Double(1)

    with pytest.raises(RuntimeError, match="ignored GeneratorExit") as caught:
        driver.run(steps())
    assert "Stop" in [type(error).__name__ for error in contexts_of(caught.value)]


def test_a_finally_may_ask_where_an_error_was_met(driver: Any) -> None:
    """After an error of a request the steps still run: their `finally` is performed like all else."""
    asked: list[int] = []

    def steps() -> Steps[None]:
        try:
            yield from Fail(Oops())
        finally:
            asked.append((yield from Double(21)))

    with pytest.raises(Oops):
        driver.run(steps())
    assert asked == [42]


@pytest.mark.parametrize("error", [Oops(), Stop(), None], ids=["error", "interruption", "end"])
def test_steps_are_closed_before_what_performs_them(driver: Any, error: BaseException | None) -> None:
    """However they end: what they write last still goes out."""
    log: list[str] = []

    def steps() -> Steps[None]:
        try:
            yield from Double(1) if error is None else Fail(error)
        finally:
            log.append("steps")

    with contextlib.suppress(Oops, Stop), contextlib.ExitStack() as connection:
        connection.callback(log.append, "connection")
        driver.run(steps())
    assert log == ["steps", "connection"]


# --- what is given on the way -----------------------------------------------------------------------------


def counting(log: list[str]) -> Generator[Double | str | None, Any, None]:
    """Give things between requests."""
    with noting(log, "steps"):
        for number in range(1, 4):
            answer = yield from Double(number)
            yield str(answer)
            yield None


def test_what_is_no_request_is_given(giver: Any) -> None:
    """Anything may be given, None too, in its order; the steps go on when more is wanted."""
    log: list[str] = []
    assert giver.each(counting(log)) == ["2", None, "4", None, "6", None]
    assert log == ["steps"]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_left_early_the_steps_are_closed_where_they_stand(giver: Any, most: int) -> None:
    """Who wants no more need not take the rest."""
    log: list[str] = []
    assert len(giver.each(counting(log), most)) == most
    assert log == ["steps: GeneratorExit"]


def failing(log: list[str]) -> Generator[Fail | str, Any, None]:
    """Give what one request met, and end with what another meets."""
    with noting(log, "steps"):
        try:
            yield from Fail(Oops("met"))
        except Oops as error:
            yield str(error)
        yield from Fail(Oops("the end"))


def test_giving_steps_are_raised_what_a_request_meets(giver: Any) -> None:
    """Where things are given on the way the rule is the same: an error is raised where it was asked for."""
    log: list[str] = []
    assert giver.each(failing(log), 1) == ["met"]
    assert log == ["steps: GeneratorExit"]


def test_giving_steps_end_with_what_they_raise(giver: Any) -> None:
    """What was given before it was right; the error is the caller's."""
    log: list[str] = []
    with pytest.raises(Oops, match="the end"):
        giver.each(failing(log))
    assert log == ["steps: Oops"]


def test_an_error_of_the_caller_closes_what_gives() -> None:
    """What the caller does with a thing it was given is not the steps' concern."""
    log: list[str] = []

    def handle(item: str | None) -> None:
        raise Oops(item)

    with contextlib.closing(each(counting(log), perform)) as items, pytest.raises(Oops):
        handle(next(items))
    assert log == ["steps: GeneratorExit"]


# --- time -------------------------------------------------------------------------------------------------


def test_the_deadline_of_the_call_holds_for_each_request(driver: Any) -> None:
    """Whoever performs a request may wait as long as the call around the driver has left."""

    def steps() -> Steps[float]:
        return (yield from Left())

    with within(5.0):
        assert 0 < driver.run(steps()) <= 5.0
    assert driver.run(steps()) == float("inf")


def test_out_of_time_is_an_error_like_any_other(driver: Any) -> None:
    """Steps may have an answer to it."""

    def steps() -> Steps[str]:
        try:
            yield from Fail(TimeoutError("no answer in time"))
        except TimeoutError:
            return "what is known"
        raise AssertionError("it took too long")

    assert driver.run(steps()) == "what is known"


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


async def test_a_cancelled_task_closes_its_steps() -> None:
    """First what performs lets go, then the steps are closed where they stand, and the task is cancelled."""
    log: list[str] = []
    started = asyncio.Event()
    task = asyncio.create_task(async_run(patient(log), waiting(log, started)))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["performer: CancelledError", "steps: GeneratorExit"]


async def test_a_limit_of_the_performer_is_an_error_in_the_steps() -> None:
    """A request that ran out of its own time is answered by an error that the steps may handle."""
    log: list[str] = []
    assert await async_run(patient(log), waiting(log, asyncio.Event(), limit_s=0)) == "out of time"
    assert log == ["performer: TimeoutError", "steps"]


async def test_a_limit_around_the_driver_closes_the_steps() -> None:
    """A limit that the caller set is the caller's: the steps are not asked."""
    log: list[str] = []
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await async_run(patient(log), waiting(log, asyncio.Event()))
    assert log == ["performer: CancelledError", "steps: GeneratorExit"]


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


# --- steps inside steps -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Inside(Request[Any]):
    """Take other steps to their end."""

    steps: Steps[Any]


def test_a_request_may_carry_steps_that_are_performed_in_another_way() -> None:
    """What is raised there is raised in the inner steps, and what they make of it in the outer ones."""

    def named(request: Fail) -> None:
        try:
            perform(request)
        except Oops as error:
            raise Oops(f"{error}, in time") from error

    def nesting(request: Request[Any]) -> Any:
        return run(request.steps, named) if isinstance(request, Inside) else perform(request)

    def inner(*, handles: bool) -> Steps[str]:
        try:
            yield from Fail(Oops("met"))
        except Oops as error:
            if handles:
                return str(error)
            raise
        raise AssertionError("it failed")

    def outer() -> Steps[tuple[str, str]]:
        handled: str = yield from Inside(inner(handles=True))
        try:
            yield from Inside(inner(handles=False))
        except Oops as error:
            return handled, f"{error}, outside"
        raise AssertionError("it failed")

    assert run(outer(), nesting) == ("met, in time", "met, in time, outside")


def test_a_cancelled_task_closes_the_inner_steps_first() -> None:
    """From the innermost outwards."""
    log: list[str] = []

    def inner() -> Steps[None]:
        with noting(log, "inner"):
            yield from Double(1)

    def outer() -> Steps[None]:
        with noting(log, "outer"):
            yield from Inside(inner())

    async def nesting(request: Request[Any]) -> Any:
        if isinstance(request, Inside):
            return await async_run(request.steps, nesting)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(async_run(outer(), nesting))
    assert log == ["inner: GeneratorExit", "outer: GeneratorExit"]
