"""Fork safety of objects with threads, sockets or an identity; and the name of a process.

A forked child has only the forking thread. Sockets are shared with the parent, and a lock that another thread held
stays locked forever. So each such object behaves in a child in one of two ways:

- It works: `after_fork` makes it create new locks and forget its connections without using them.
- It ends: after `of_one_process`, calls raise `UsedAfterFork`, and closing it does nothing. The parent continues to use
  its threads, leases, numbers and connections.

This costs nothing without a fork, or in the parent. Other ways to start processes copy no objects.
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
"""Methods that end an object. In a child they do nothing and return True, as if it had ended already."""

_USES: Final = frozenset(
    {"__call__", "__enter__", "__aenter__", "__iter__", "__aiter__", "__next__", "__anext__", "__getitem__"}
)

_renewed: "WeakKeyDictionary[Any, Callable[[Any], None]]" = WeakKeyDictionary()
_single: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()
_left: list[Any] = []
"""Objects of the parent, kept so that the child does not finalise them."""


def after_fork(owner: Any, renew: Callable[[Any], None]) -> None:
    """Call `renew(owner)` in each forked child before other code runs there.

    `renew` makes new locks and forgets connections, without taking locks, waiting or sending. It must not refer to the
    owner, which is held weakly: pass a function of the class.
    """
    _renewed[owner] = renew


def of_one_process(owner: Any, what: str) -> None:
    """End an object in each forked child: its public methods raise `UsedAfterFork`, and closing it does nothing.

    Args:
        owner: The object, held weakly. Its attributes do not change.
        what: The object's name in the error, with an article: "a recorder".
    """
    _single[owner] = what


def leave_to_parent(*objects: Any) -> None:
    """Keep objects of the parent alive in the child: finalisers would send on the parent's sockets."""
    _left.extend(objects)


def _in_child() -> None:
    for owner, what in list(_single.items()):
        kind: Any = type(owner)
        owner.__class__ = _ended(kind, what)
    for owner, renew in list(_renewed.items()):
        renew(owner)


@functools.cache
def _ended(kind: Any, what: str) -> Any:
    """Return the class that a parent's object gets in a child."""

    def refuse(*_args: Any, **_options: Any) -> Any:
        raise UsedAfterFork(
            f"{what} was made before a fork, and works only in the process that made it: create one in this process; "
            "nothing was sent or written"
        )

    body: dict[str, Any] = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if all("__dict__" not in vars(each) for each in kind.__mro__ if each is not object):
        body["__slots__"] = ()
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        if inspect.isfunction(method) and (not name.startswith("_") or name in _ENDINGS | _USES):
            end = _nothing_async if inspect.iscoroutinefunction(method) else _nothing
            body[name] = end if name in _ENDINGS else refuse
    return type(kind.__name__, (kind,), body)


def _nothing(_self: Any, *args: Any, **_options: Any) -> bool | None:
    # `__exit__` gets three arguments and must not suppress an error.
    return None if len(args) == len(("kind", "error", "trace")) else True


async def _nothing_async(_self: Any, *args: Any, **_options: Any) -> bool | None:
    return _nothing(_self, *args)


# The standard library's hooks run first: by now, `threading` has forgotten the other threads.
os.register_at_fork(after_in_child=_in_child)


def new_holder() -> str:
    """Return a name for this process as a holder of leases: host, process id and random digits."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(6)}"
