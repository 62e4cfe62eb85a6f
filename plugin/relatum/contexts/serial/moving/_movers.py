"""Many moves side by side: which there have to be, and performing them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice
from typing import Final, NamedTuple

from relatum import otel
from relatum.contexts.placement._model import Placement
from relatum.contexts.placement._placement_store import PlacementStore
from relatum.contexts.serial.moving import _move_steps as moving
from relatum.contexts.serial.moving._assignments import Call, Move
from relatum.contexts.serial.moving._controls import ControlStreams
from relatum.contexts.serial.moving._move_store import MoveStore, NothingToMove, logger
from relatum.contexts.serial.moving._mover import Mover, go_on_with_abandoned
from relatum.errors import Conflict, MoveConflict, RelatumError
from relatum.otel import Part
from relatum.waiting import log_failure

MOVES_AT_ONCE: Final = 4
"""How many moves are performed side by side unless the caller says otherwise."""

CONTEXTS_MAX: Final = 500
"""Contexts of one move: all are in its fence and in its marker, which are to stay small messages."""

FOUND_AT_ONCE: Final = 5_000
"""Contexts looked up in one statement."""

ROUNDS_MAX: Final = 10
"""How often contexts are looked up again that were elsewhere when their move began."""


class Wanted(NamedTuple):
    """A move that has not begun: these contexts are in the source, or were just now."""

    source: str
    target: str
    contexts: frozenset[str]


class Movers:
    """Performs moves of one super stream."""

    def __init__(
        self, placements: PlacementStore, moves: MoveStore, streams: ControlStreams, *, at_once: int, retry_s: float
    ) -> None:
        self._placements = placements
        self._moves = moves
        self._streams = streams
        self._at_once = at_once
        self._retry_s = retry_s

    def move_all(self, contexts: Mapping[str, Collection[str]], call: Call) -> list[Move]:
        """Move contexts, by target. Those that nobody placed, or not any more, are passed over.

        Raises:
            MoveConflict: another move has one of them.
            Conflict: some went elsewhere again and again, before their move began.
        """
        self._go_on_with_abandoned()
        ended: list[Move] = []
        left = dict(contexts)
        for _ in range(ROUNDS_MAX):
            wanted = [each for target, names in left.items() for each in self._needed(names, target)]
            if not wanted:
                return ended
            call.contexts_all = call.contexts_done + sum(len(each.contexts) for each in wanted)
            left = {}
            for move, missed in self._perform_all(wanted, call):
                if move is not None:
                    ended.append(move)
                if missed.contexts:
                    left[missed.target] = [*left.get(missed.target, ()), *missed.contexts]
        raise Conflict("contexts go elsewhere before they can be moved: others move them, too; repeat it later")

    def _go_on_with_abandoned(self) -> None:
        """End what others left, so that it is not in the way; where that cannot be, those contexts are a conflict."""
        try:
            go_on_with_abandoned(self._moves, lambda: nullcontext(self._streams))
        except RelatumError as error:
            log_failure(logger, error, "an abandoned move was not gone on with here")

    def perform(self, steps: moving.Steps, call: Call, *, reason: str | None = None) -> Move:
        """Perform one move; gives it as it ended."""
        return self._moves.move(self._mover(call, reason).run(steps).move_id)

    def _mover(self, call: Call, reason: str | None = None) -> Mover:
        return Mover(self._moves, self._streams, retry_s=self._retry_s, reason=reason, tell=call.tell)

    def _needed(self, names: Collection[str], target: str) -> list[Wanted]:
        """The moves it takes to have names in the target."""
        leaving: dict[str, list[str]] = {}
        for placement in find_some(self._placements, names).values():
            self._check_stands(placement)
            if placement.stream != target:
                leaving.setdefault(placement.stream, []).append(placement.name)
        return [
            Wanted(source, target, frozenset(some))
            for source, those in leaving.items()
            for some in in_parts(those, CONTEXTS_MAX)
        ]

    def _check_stands(self, placement: Placement) -> None:
        if placement.move_id is None:
            return
        found = self._moves.move(placement.move_id)
        if not found.state.is_ended:
            raise MoveConflict(
                f"{placement.name!r} is moved already, by move {found.move_id}: go on with that one, or abort it",
                move_id=found.move_id,
                state=found.state.value,
            )

    def _perform_all(self, wanted: Sequence[Wanted], call: Call) -> list[tuple[Move | None, Wanted]]:
        """Perform moves side by side. When one is stopped, those beside it are completed and no other begins.

        Gives each move, None where it did not begin, with those of its contexts that were elsewhere by then.
        """
        perform = otel.carried(Part.MOVES, self._perform_one)
        with ThreadPoolExecutor(self._at_once, "relatum-move") as pool:
            futures = [pool.submit(perform, each, call) for each in wanted]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _perform_one(self, wanted: Wanted, call: Call) -> tuple[Move | None, Wanted]:
        try:
            ended = self._mover(call).run(moving.move(wanted.source, wanted.target, wanted.contexts))
        except NothingToMove:
            return None, wanted
        return self._moves.move(ended.move_id), wanted._replace(contexts=wanted.contexts - ended.contexts)


def find_some(placements: PlacementStore, names: Iterable[str]) -> dict[str, Placement]:
    """The placements of those names that are placed; any number of names."""
    found: dict[str, Placement] = {}
    for some in in_parts(names, FOUND_AT_ONCE):
        found.update(placements.find(some))
    return found


def in_parts(names: Iterable[str], count: int) -> Iterator[list[str]]:
    """Names in lists of at most so many."""
    rest = iter(names)
    while part := list(islice(rest, count)):
        yield part
