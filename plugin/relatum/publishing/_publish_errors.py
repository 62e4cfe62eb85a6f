"""Errors of a publish that are ours and the client's own at once.

A caller that knows pika writes `except pika.exceptions.NackError`; one that knows Relatum writes
`except relatum.errors.PublishNacked`. Both must catch the same exception, so its class has both as bases. It is made
once for each pair, and keeps the arguments, the attributes and the text of the client's exception.
"""

from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

from relatum.errors import PublishError

_Outcome = TypeVar("_Outcome", bound=PublishError)

_OF_THE_PROCESS = frozenset({"settle", "link", "connection"})

_classes: dict[tuple[type[PublishError], type[Exception]], type[PublishError]] = {}


def outcome(ours: type[_Outcome], theirs: Exception, **fields: Any) -> _Outcome:
    """The client's exception as one of ours too; raise it `from` the client's."""
    if isinstance(theirs, ours):
        theirs.__dict__.update(fields)
        return theirs
    return _rebuild(ours, type(theirs), theirs.args, {**_attributes(theirs), **fields})


def _rebuild(
    ours: type[_Outcome], theirs: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]
) -> _Outcome:
    kind = _class_of(ours, theirs)
    # Neither initialiser runs: pika's build `args` out of other arguments, which are gone.
    error: _Outcome = kind.__new__(kind, *args)
    error.args = args
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def _class_of(ours: type[_Outcome], theirs: type[Exception]) -> type[_Outcome]:
    kind = _classes.get((ours, theirs))
    if kind is None:
        body = {
            "__doc__": ours.__doc__,
            "__module__": ours.__module__,
            "__qualname__": ours.__qualname__,
            "__reduce__": lambda self: (_rebuild, (ours, theirs, self.args, _picklable(self))),
            "__init__": Exception.__init__,
            "__str__": theirs.__str__,
            "__repr__": theirs.__repr__,
        }
        kind = _classes[ours, theirs] = type(ours.__name__, (ours, theirs), body)
    return kind  # type: ignore[return-value]


def _attributes(error: Exception) -> dict[str, Any]:
    """What the exception carries beside its arguments: aiormq keeps it in slots, pika in the instance's dictionary."""
    slots = {
        name: getattr(error, name)
        for kind in type(error).__mro__
        for name in _slots(kind)
        if not name.startswith("__") and hasattr(error, name)
    }
    if isinstance(error, OSError) and error.errno is not None:
        slots.update(errno=error.errno, strerror=error.strerror)
    return {**slots, **{name: value for name, value in vars(error).items() if name != "__notes__"}}


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _picklable(error: Exception) -> dict[str, Any]:
    """The attributes without what is of this process: what settles the outcome, links, connections, channels."""
    return {name: _apart(value) for name, value in _attributes(error).items() if name not in _OF_THE_PROCESS}


def _apart(value: Any) -> Any:
    """A message that came back, as aiormq has it, without its channel; anything else as it is."""
    if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "channel"):
        return replace(value, channel=None)
    return value
