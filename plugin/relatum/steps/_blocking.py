# Generated from _asyncio.py by tools/make-twins: edit that, then "make twins".
"""The blocking driver of steps."""

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from relatum.steps._request import Request

_Request = TypeVar("_Request", bound=Request[Any])
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def run(steps: Generator[_Request, Any, _Result], perform: Callable[[_Request], Any]) -> _Result:
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


def each(
    steps: Generator[Request[Any] | _Item, Any, None], perform: Callable[[Any], Any]
) -> Generator[_Item, None, None]:
    """What steps give on the way, as it comes: all they yield that is no `Request`.

    To be closed where it is left early (`contextlib.closing`): then the steps are closed where they stand.

    Args:
        steps: Of this call alone.
        perform: As for `run`.
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
                answer = perform(step)
            except Exception as met:  # noqa: BLE001 - raised where it was asked for
                error = met
    except StopIteration:
        return
    finally:
        error = None
        steps.close()
