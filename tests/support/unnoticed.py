"""What somebody who looks at an object sees of its methods, whoever stands in for them."""

import inspect
from typing import Any


def looks(owner: Any) -> dict[str, tuple[Any, ...]]:
    """Of each method of an object: names, description, signature, whose it is, and what kind of callable.

    `inspect` goes by the kind, and so does `unittest.mock`, which checks calls of methods by their signature.
    """
    found = {}
    for name in dir(type(owner)):
        if inspect.isfunction(inspect.getattr_static(type(owner), name)):
            method = getattr(owner, name)
            whose = getattr(method, "__self__", None) is owner
            written = (method.__name__, method.__qualname__, method.__module__, method.__doc__)
            kinds = [kind(method) for kind in (inspect.ismethod, inspect.isroutine, inspect.iscoroutinefunction)]
            found[name] = (*written, str(inspect.signature(method)), whose, *kinds)
    return found
