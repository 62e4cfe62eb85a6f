# The blocking face of this, _blocking.py, is made by tools/make-twins.
"""The asyncio driver of steps."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, TypeVar

from relatum.steps._request import Request

_Request = TypeVar("_Request", bound=Request[Any])
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


async def async_run(steps: Generator[_Request, Any, _Result], perform: Callable[[_Request], Awaitable[Any]]) -> _Result:
    """Take steps to their end; what they return, and what they raise.

    Args:
        steps: They give nothing on the way; of this call alone, and closed when it returns or is interrupted.
        perform: Gives the answer to a request. An `Exception` that it raises is raised in the steps.
    """
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
        # An error that holds this frame, which holds the error, would live until the garbage collector comes by.
        error = None
        steps.close()


async def async_each(
    steps: Generator[Request[Any] | _Item, Any, None], perform: Callable[[Any], Awaitable[Any]]
) -> AsyncGenerator[_Item, None]:
    """What steps give on the way, as it comes: all they yield that is no `Request`.

    To be closed where it is left early (`contextlib.aclosing`): then the steps are closed where they stand.

    Args:
        steps: Of this call alone.
        perform: As for `async_run`.
    """
    answer: Any = None
    error: Exception | None = None
    try:
        while True:
            step = steps.send(answer) if error is None else steps.throw(error)
            answer = error = None
            if not isinstance(step, Request):
                yield step
                continue
            try:
                answer = await perform(step)
            except Exception as met:  # noqa: BLE001 - raised where it was asked for
                error = met
    except StopIteration:
        return
    finally:
        error = None
        steps.close()
