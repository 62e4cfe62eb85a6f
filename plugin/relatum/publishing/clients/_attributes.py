"""What is put in the place of a method of one object, and taken away again. Nothing is done to classes."""

from collections.abc import Callable
from typing import Any


class Replacement:
    """Stands in for a method of one object.

    Attributes:
        replaced: What the object's own attribute was before; None: there was none.
    """

    replaced: Any = None


class Wrapper(Replacement):
    """Calls what it stands in for, then does `after` with what that returned, while `interception` is active."""

    def __init__(self, wrapped: Callable[..., Any], interception: Any, after: Callable[[Any], None]) -> None:
        self.__wrapped__ = wrapped
        self.__doc__ = wrapped.__doc__
        self._interception = interception
        self._after = after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__wrapped__(*args, **kwargs)
        if self._interception.active:
            self._after(result)
        return result


def put(owner: Any, name: str, replacement: Replacement) -> None:
    """Have it stand in for the method."""
    replacement.replaced = vars(owner).get(name)
    setattr(owner, name, replacement)


def put_back(owner: Any, name: str) -> None:
    """Put back what was there before. What somebody else has wrapped since stays."""
    present = vars(owner).get(name)
    if not isinstance(present, Replacement):
        return
    if present.replaced is None:
        delattr(owner, name)
    else:
        setattr(owner, name, present.replaced)
