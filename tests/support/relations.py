"""Both faces of lookups behind one interface, for tests that hold of each."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from relatum import Broker
from relatum_consumer import AsyncRelations, Relations
from tests.support._waiting import result_of

FACES = ["blocking", "asyncio"]


class OnLoop:
    """What is asked by coroutines, each call run to its end on one event loop."""

    def __init__(self, runner: asyncio.Runner, asked: Any) -> None:
        self._runner, self._asked = runner, asked

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._asked, name)
        return lambda *args, **options: result_of(self._runner, method(*args, **options))


@contextmanager
def open_relations(face: str, broker: str | Broker, database: str, **options: Any) -> Iterator[Relations]:
    if face == "blocking":
        with Relations(broker, database, **options) as relations:
            yield relations
        return
    with asyncio.Runner() as runner:
        relations = OnLoop(runner, AsyncRelations(broker, database, **options))
        try:
            yield relations  # type: ignore[misc]
        finally:
            relations.close()


@contextmanager
def questions() -> Iterator[list[dict[str, Any]]]:
    """What lookups in the block, of this process, ask of servers: the log `relatum.lookups`."""
    asked: list[dict[str, Any]] = []
    logger, handler = logging.getLogger("relatum.lookups"), logging.Handler()
    handler.emit = lambda record: asked.append(record.args)  # type: ignore[assignment,method-assign,arg-type,return-value]
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield asked
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
