"""The blocking and the asyncio face of a class say the same: methods, arguments and defaults."""

import inspect
import re

import pytest

import relatum
from relatum.reading import AsyncStreamReader, StreamReader
from relatum.superstreams import Target
from relatum_consumer import AsyncRelations, AsyncSharedGroup, AsyncSharedGroups, Relations, SharedGroup, SharedGroups

BLOCKING_ALONE = {"link", "places"}
"""Connections for a loop of the caller's own, and where to open them."""

IN_ASYNCIO = {"__next__": "__anext__", "__enter__": "__aenter__", "__exit__": "__aexit__"}

OF_CLIENTS = {"publish", *(name for name in dir(Target) if not name.startswith("_"))}
"""What routers take, as their client does: a channel of pika's with body and properties, or aio-pika's."""


def methods(kind: type, *special: str, names: dict[str, str]) -> dict[str, str]:
    public = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
    public = [name for name in public if not (name in OF_CLIENTS and kind.__name__.endswith("Router"))]
    return {
        names.get(name, name): without_asyncio(str(inspect.signature(getattr(kind, name))))
        for name in (*public, *special)
    }


def without_asyncio(signature: str) -> str:
    # An asynchronous generator has one type fewer: it returns nothing.
    text = re.sub(r"AsyncGenerator\[(.*?), None\]", r"Generator[\1, None, None]", signature)
    text = re.sub(r"collections\.abc\.Awaitable\[(\w+)\]", r"\1", text)
    return text.replace("Async", "").replace("._async_", "._").replace("asyncio.locks", "threading")


@pytest.mark.parametrize(
    ("blocking", "asynchronous", "special", "names"),
    [
        (Relations, AsyncRelations, ("__init__", "__enter__", "__exit__"), {}),
        # An iteration is closed as an asynchronous generator is.
        (SharedGroups, AsyncSharedGroups, ("__next__", "__enter__", "__exit__"), {"close": "aclose"}),
        (SharedGroup, AsyncSharedGroup, (), {}),
        (relatum.ContextRouter, relatum.AsyncContextRouter, ("__init__", "__enter__", "__exit__"), {}),
        (relatum.AffinityRouter, relatum.AsyncAffinityRouter, ("__init__", "__enter__", "__exit__"), {}),
        (relatum.SerialConsumer, relatum.AsyncSerialConsumer, ("__init__", "__enter__", "__exit__"), {}),
        (StreamReader, AsyncStreamReader, ("__enter__", "__exit__"), {}),
    ],
)
def test_both_faces_agree(blocking: type, asynchronous: type, special: tuple[str, ...], names: dict[str, str]) -> None:
    """Each with the same arguments, defaults and results."""
    expected = methods(blocking, *special, names=IN_ASYNCIO | names)
    for name in BLOCKING_ALONE:
        expected.pop(name, None)
    assert methods(asynchronous, *(IN_ASYNCIO.get(name, name) for name in special), names={}) == expected
