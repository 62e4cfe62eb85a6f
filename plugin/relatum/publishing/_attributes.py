"""What is put in the place of a method of one object, and taken away again. Nothing is done to classes."""

from collections.abc import Callable
from typing import Any


class Replacement:
    """Stands in for a method of one object, and looks like it: decorators choose by its name, and by whether to await.

    Attributes:
        replaced: What the object's own attribute was before; None: there was none.
        __wrapped__: What it stands in for.
    """

    replaced: Any = None

    @property
    def __class__(self) -> Any:
        """What `isinstance` finds beside our own class: a method, by which `inspect` and `unittest.mock` know one."""
        return self.__wrapped__.__class__

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        # In a child `relatum.processes` ends the object so.
        vars(object)["__class__"].__set__(self, kind)

    def __getattr__(self, name: str) -> Any:
        # `inspect` knows by a function's attributes, its code among them, whether it gives a coroutine.
        if name == "__wrapped__" or not vars(self):
            raise AttributeError(name)  # A copy that is being made has nothing yet.
        return getattr(self.__wrapped__, name)


class Late(Replacement):
    """Looks up the method it stands in for at each call: the class may be instrumented in between.

    Args:
        owner: Gives the object.
        name: Its method.
    """

    def __init__(self, owner: Callable[[], Any], name: str) -> None:
        self._owner = owner
        self._name = name

    @property
    def __wrapped__(self) -> Any:
        """The object's own method, or what others had put there."""
        if self.replaced is not None:
            return self.replaced
        owner = self._owner()
        return getattr(type(owner), self._name).__get__(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


class Watch(Late):
    """Calls what it stands in for, then `after(result, *args, **kwargs)`."""

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
    # Its class has these, too, so they would not be looked for in what it stands in for.
    replacement.__doc__, replacement.__module__ = wrapped.__doc__, wrapped.__module__
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
