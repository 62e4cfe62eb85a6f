"""Steps: what decides about publications and moves is pure, and yields what it needs; a driver performs that.

Steps are a generator of `Request`s, driven by `run` or `async_run`. They go on with the answer, or with the error that
the request met: a request reads like a call, `generation = yield from ReadGeneration()`. The model checker drives the
same generators.

- What a request meets, any `Exception`, is raised in the steps where they asked for it.
- What ends the driver itself (a task that is cancelled, Ctrl-C) closes the steps there: their `finally` runs, and to
  ask for more then is a defect (`RuntimeError`).
- However they end, the steps are closed before the driver returns or raises.
"""

from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, Self, TypeVar

_Answer = TypeVar("_Answer")
_Result = TypeVar("_Result")


class Request(Generic[_Answer]):
    """Something to be done for steps; the type is its answer's. Each kind is a frozen dataclass that says what."""

    __slots__ = ()

    def __iter__(self) -> Generator[Self, Any, _Answer]:
        """Ask for it: the answer is what the driver sends."""
        answer: _Answer = yield self
        return answer


_Request = TypeVar("_Request", bound=Request[Any])


def run(steps: Generator[_Request, Any, _Result], perform: Callable[[_Request], Any]) -> _Result:
    """Take steps to their end; what they return, and what they raise. An error of `perform` is raised in the steps."""
    answer: Any = None
    error: Exception | None = None
    try:
        while True:
            request = steps.send(answer) if error is None else steps.throw(error)
            answer = error = None
            try:
                answer = perform(request)
            except Exception as met:  # noqa: BLE001 - raised where it was asked for
                error = met
    except StopIteration as end:
        result: _Result = end.value
        return result
    finally:
        # An error that holds this frame, which holds the error, would live until the garbage collector comes by.
        error = None
        steps.close()


async def async_run(steps: Generator[_Request, Any, _Result], perform: Callable[[_Request], Awaitable[Any]]) -> _Result:
    """As `run`, for a task: requests are awaited."""
    answer: Any = None
    error: Exception | None = None
    try:
        while True:
            request = steps.send(answer) if error is None else steps.throw(error)
            answer = error = None
            try:
                answer = await perform(request)
            except Exception as met:  # noqa: BLE001 - raised where it was asked for
                error = met
    except StopIteration as end:
        result: _Result = end.value
        return result
    finally:
        error = None
        steps.close()
