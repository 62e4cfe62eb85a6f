"""Replaces a method of one object, and restores it. Classes are not changed."""

from collections.abc import Callable
from typing import Any


class Replacement:
    """Replaces a method of one object and resembles it: decorators check its name, and whether it is awaited.

    `replaced` is the object's own attribute before, None if it had none; `__wrapped__` is the replaced method.
    """

    replaced: Any = None

    @property
    def __class__(self) -> Any:
        """The method's class, by which `inspect` and `unittest.mock` recognise a method."""
        return self.__wrapped__.__class__

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        # `relatum.processes` sets it to end the object in a child.
        vars(object)["__class__"].__set__(self, kind)

    def __getattr__(self, name: str) -> Any:
        # `inspect` reads attributes, such as the code object, to see whether a function returns a coroutine.
        if name == "__wrapped__" or not vars(self):
            raise AttributeError(name)  # `copy` has not set the attributes yet.
        return getattr(self.__wrapped__, name)


class LateBound(Replacement):
    """Looks the method up at each call: its class may be instrumented later. `owner` returns the object."""

    def __init__(self, owner: Callable[[], Any], name: str) -> None:
        self._owner = owner
        self._name = name

    @property
    def __wrapped__(self) -> Any:
        """The object's method, or what another library had set instead."""
        if self.replaced is not None:
            return self.replaced
        owner = self._owner()
        return getattr(type(owner), self._name).__get__(owner)


class Watch(LateBound):
    """Calls the method, then `after(result, *args, **kwargs)`."""

    def __init__(self, owner: Callable[[], Any], name: str, after: Callable[..., None]) -> None:
        super().__init__(owner, name)
        self._after = after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__wrapped__(*args, **kwargs)
        self._after(result, *args, **kwargs)
        return result


def put(owner: Any, name: str, replacement: Replacement) -> None:
    replacement.replaced = vars(owner).get(name)
    wrapped = replacement.__wrapped__
    # The replacement's class has these too, so `__getattr__` is not called for them.
    replacement.__doc__, replacement.__module__ = wrapped.__doc__, wrapped.__module__
    setattr(owner, name, replacement)


def put_back(owner: Any, name: str) -> None:
    """Restore the original method. Wrappers that others have added since stay."""
    present = vars(owner).get(name)
    if not isinstance(present, Replacement):
        return
    if present.replaced is None:
        delattr(owner, name)
    else:
        setattr(owner, name, present.replaced)
