"""Makes objects with threads, sockets or an identity fork-safe, and names this process as a holder of leases.

A forked child has only the thread that forked. It shares the parent's sockets, and a lock that another thread held
stays locked forever. So each such object behaves in a child in one of two ways:

- It works: `after_fork` makes it create new locks and forget its connections without using them.
- It ends: after `refuse_in_child`, calls raise `UsedAfterFork`, and closing it does nothing. The parent continues to
  use its threads, leases, numbers and connections.

A process that does not fork, and a parent, pay nothing. Other ways to start processes copy no objects.
"""

import functools
import inspect
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

from relatum.errors import UsedAfterFork

_ENDINGS: Final = frozenset({"close", "aclose", "release", "__exit__", "__aexit__"})
"""Methods that end an object. In a child they do nothing and return True, as if the object had already ended."""

_USES: Final = frozenset(
    {"__call__", "__enter__", "__aenter__", "__iter__", "__aiter__", "__next__", "__anext__", "__getitem__"}
)
"""Special methods that use an object. In a child, they raise `UsedAfterFork` like public methods."""

_renewals: "WeakKeyDictionary[Any, Callable[[Any], None]]" = WeakKeyDictionary()
_not_fork_safe: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()
_parents_objects: list[Any] = []
"""Objects of the parent, referenced so that the child does not finalise them."""


def after_fork(owner: Any, renew: Callable[[Any], None]) -> None:
    """Call `renew(owner)` in each forked child before other code runs there.

    `renew` creates new locks and forgets connections; it must not take locks, wait or send. It must not refer to the
    owner, which is held weakly: pass a function of the owner's class.
    """
    _renewals[owner] = renew


def refuse_in_child(owner: Any, what: str) -> None:
    """End an object in each forked child: its public methods raise `UsedAfterFork`, and closing it does nothing.

    A fork changes the class of `owner` in the child, but none of its attributes. Errors name it `what`: "a recorder".
    """
    _not_fork_safe[owner] = what


def leave_to_parent(*objects: Any) -> None:
    """Keep the parent's objects alive in the child: their finalisers would send on the parent's sockets."""
    _parents_objects.extend(objects)


def _in_child() -> None:
    for owner, what in list(_not_fork_safe.items()):
        kind: Any = type(owner)
        owner.__class__ = _refusing_class(kind, what)
    for owner, renew in list(_renewals.items()):
        renew(owner)


@functools.cache
def _refusing_class(kind: Any, what: str) -> Any:
    """Return the class of a parent's object in a child: its public methods raise `UsedAfterFork`."""

    def refuse(*_args: Any, **_options: Any) -> Any:
        raise UsedAfterFork(
            f"{what} was created before a fork, and works only in the process that created it: create one in this "
            "process; nothing was sent or written"
        )

    body: dict[str, Any] = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if all("__dict__" not in vars(each) for each in kind.__mro__ if each is not object):
        body["__slots__"] = ()
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        if inspect.isfunction(method) and (not name.startswith("_") or name in _ENDINGS | _USES):
            end = _no_op_async if inspect.iscoroutinefunction(method) else _no_op
            body[name] = end if name in _ENDINGS else refuse
    return type(kind.__name__, (kind,), body)


def _no_op(_self: Any, *args: Any, **_options: Any) -> bool | None:
    # `__exit__` gets three arguments and must not suppress an error.
    return None if len(args) == len(("kind", "error", "trace")) else True


async def _no_op_async(_self: Any, *args: Any, **_options: Any) -> bool | None:
    return _no_op(_self, *args)


# The standard library's hooks run first: by now, `threading` has forgotten the other threads.
os.register_at_fork(after_in_child=_in_child)


def new_holder() -> str:
    """Return a unique name for a holder of leases: host, process id and random digits."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(6)}"
