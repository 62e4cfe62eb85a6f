"""Steps inside steps, where each request of the inner ones is performed by steps of its own."""

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from relatum.steps._request import Request

_Inner = TypeVar("_Inner", bound=Request[Any])
_Outer = TypeVar("_Outer", bound=Request[Any])
_Result = TypeVar("_Result")


def nested(
    steps: Generator[_Inner, Any, _Result], perform: Callable[[_Inner], Generator[_Outer, Any, Any]]
) -> Generator[_Outer, Any, _Result]:
    """The result of steps whose requests are asked for in another way: within a limit, or again. Rules as for `run`.

    Args:
        steps: They give nothing on the way; of this call alone.
        perform: The steps that come to the answer of a request. An `Exception` they raise is raised in `steps`.
    """
    answer: Any = None
    error: Exception | None = None
    try:
        while True:
            request = steps.send(answer) if error is None else steps.throw(error)
            answer = error = None
            try:
                answer = yield from perform(request)
            except Exception as met:  # noqa: BLE001 - raised where it was asked for
                error = met
    except StopIteration as end:
        result: _Result = end.value
        return result
    finally:
        error = None
        steps.close()
