"""Both faces of look-ups behind one interface, for tests that hold of each."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from inspect import isasyncgen, iscoroutine
from typing import Any

from relatum_consumer import AsyncRelations, Relations

FACES = ["blocking", "asyncio"]


class OnLoop:
    """`AsyncRelations`, each call run to its end on one event loop."""

    def __init__(self, runner: asyncio.Runner, relations: AsyncRelations) -> None:
        self._runner = runner
        self._relations = relations

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._relations, name)

        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            # In the caller's context, as a blocking call is.
            here = copy_context()
            if isasyncgen(result):
                return self._runner.run(_collected(result), context=here)
            return self._runner.run(result, context=here) if iscoroutine(result) else result

        return call


async def _collected(results: AsyncIterator[Any]) -> list[Any]:
    return [result async for result in results]


@contextmanager
def open_relations(face: str, broker: str, database: str, **options: Any) -> Iterator[Relations]:
    """Look-ups through one of `FACES`."""
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
    """What look-ups in the block, of this process, ask of servers: the log `relatum.lookups`."""
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
