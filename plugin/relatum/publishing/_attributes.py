"""Replacing a method of one object, and restoring it. Classes are not changed."""

from collections.abc import Callable
from typing import Any


class Replacement:
    """Replaces a method of one object and looks like it: decorators look at its name, and whether it is awaited.

    Attributes:
        replaced: The object's own attribute before; None: it had none.
        __wrapped__: The method that is replaced.
    """

    replaced: Any = None

    @property
    def __class__(self) -> Any:
        """The class of the method, by which `inspect` and `unittest.mock` recognise one."""
        return self.__wrapped__.__class__

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        # In a child `relatum.processes` ends the object so.
        vars(object)["__class__"].__set__(self, kind)

    def __getattr__(self, name: str) -> Any:
        # `inspect` reads a function's attributes, also its code, to see whether it returns a coroutine.
        if name == "__wrapped__" or not vars(self):
            raise AttributeError(name)  # A copy in the making has no attributes yet.
        return getattr(self.__wrapped__, name)


class Late(Replacement):
    """Looks the method up at each call: the class may be instrumented in between.

    Args:
        owner: Returns the object.
        name: The method's name.
    """

    def __init__(self, owner: Callable[[], Any], name: str) -> None:
        self._owner = owner
        self._name = name

    @property
    def __wrapped__(self) -> Any:
        """The object's method, or what others had put there."""
        if self.replaced is not None:
            return self.replaced
        owner = self._owner()
        return getattr(type(owner), self._name).__get__(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


class Watch(Late):
    """Calls the method, then `after(result, *args, **kwargs)`."""

    def __init__(self, owner: Callable[[], Any], name: str, after: Callable[..., None]) -> None:
        super().__init__(owner, name)
        self._after = after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        self._after(result, *args, **kwargs)
        return result


def put(owner: Any, name: str, replacement: Replacement) -> None:
    """Replace a method of one object."""
    replacement.replaced = vars(owner).get(name)
    wrapped = replacement.__wrapped__
    # The class of the replacement has these too, so `__getattr__` would not be asked.
    replacement.__doc__, replacement.__module__ = wrapped.__doc__, wrapped.__module__
    setattr(owner, name, replacement)


def put_back(owner: Any, name: str) -> None:
    """Restore what was there before. What others have wrapped since stays."""
    present = vars(owner).get(name)
    if not isinstance(present, Replacement):
        return
    if present.replaced is None:
        delattr(owner, name)
    else:
        setattr(owner, name, present.replaced)
