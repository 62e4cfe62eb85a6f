"""What is put in the place of a method of one object, and taken away again. Nothing is done to classes."""

from collections.abc import Callable
from typing import Any

from relatum.superstreams import note_secret


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
    """What it stands in for is looked up at each call: instrumentation may be put on the class meanwhile.

    Args:
        owner: Gives the object.
        name: Its method.
    """

    def __init__(self, owner: Callable[[], Any], name: str) -> None:
        self._owner = owner
        self._name = name
        _describe(self)

    @property
    def __wrapped__(self) -> Any:
        """The object's own method, or what others had put there."""
        if self.replaced is not None:
            return self.replaced
        owner = self._owner()
        return getattr(type(owner), self._name).__get__(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


class Renewal(Late):
    """Stands in for the method by which a connection tells the broker a new password, and notes what was told.

    Args:
        connection: The connection.
        name: Its method, whose first argument is the password.
        argument: What that is called.
    """

    def __init__(self, connection: Any, name: str, argument: str) -> None:
        super().__init__(lambda: connection, name)
        self._argument = argument

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__wrapped__(*args, **kwargs)
        note_secret(self._owner(), args[0] if args else kwargs.get(self._argument))
        return result


class Wrapper(Replacement):
    """Calls what it stands in for, then does `after` with what that returned, while `interception` is active."""

    def __init__(self, wrapped: Callable[..., Any], interception: Any, after: Callable[[Any], None]) -> None:
        self.__wrapped__ = wrapped
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
    _describe(replacement)
    setattr(owner, name, replacement)


def _describe(replacement: Replacement) -> None:
    """Give it what its class has too, so that it is not looked for in what it stands in for."""
    wrapped = replacement.__wrapped__
    replacement.__doc__, replacement.__module__ = wrapped.__doc__, wrapped.__module__


def put_back(owner: Any, name: str) -> None:
    """Put back what was there before. What somebody else has wrapped since stays."""
    present = vars(owner).get(name)
    if not isinstance(present, Replacement):
        return
    if present.replaced is None:
        delattr(owner, name)
    else:
        setattr(owner, name, present.replaced)
