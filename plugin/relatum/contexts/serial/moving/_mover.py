"""Performs the steps of moves: against PostgreSQL and the broker, again and again while they do not answer."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from relatum import otel
from relatum.contexts.placement._model import MoveInfo
from relatum.contexts.serial.moving._controls import ControlStreams
from relatum.contexts.serial.moving._move_steps import (
    Begin,
    FindControl,
    FindEnd,
    FindSessions,
    ForgetSession,
    LetFence,
    Look,
    MoveRequest,
    MoveStep,
    PublishControl,
    SetAborting,
    SetFenced,
    Sleep,
    Steps,
    Switch,
)
from relatum.contexts.serial.moving._move_store import MoveStore
from relatum.errors import PublishNacked, PublishUnroutable, RelatumError, Transient
from relatum.otel import Description, Part
from relatum.processes import new_holder
from relatum.steps import run
from relatum.store import LEASE_S, renewal_s
from relatum.waiting import Server

RETRY_S: Final = 30.0
"""Seconds for which a step is tried again while the broker or the database does not answer."""

PAUSE_S: Final = 0.2
"""Seconds between such attempts."""

_PASSING: Final = (Transient, PublishNacked, PublishUnroutable)
"""What may be over at the next attempt. A broker that starts routes to its streams a second after it answers."""


class Mover:
    """Performs the steps of one move."""

    def __init__(
        self,
        store: MoveStore,
        streams: ControlStreams,
        *,
        retry_s: float = RETRY_S,
        reason: str | None = None,
        holder: str | None = None,
        tell: Callable[[MoveInfo], None] = lambda move: None,
    ) -> None:
        self._store = store
        store.outages.name(Server.BROKER, str(streams.address))
        self._retry_s = retry_s
        self._tell = tell
        # For this move alone: by it a repeated beginning knows the move that the first one began.
        self._holder = holder or new_holder()
        self._known: MoveStep | None = None
        self._ways: dict[type[MoveRequest], Callable[[Any], Any]] = {
            FindEnd: lambda wanted: streams.end_of(wanted.stream),
            Begin: lambda wanted: store.begin(wanted, self._holder),
            Look: self._look,
            FindSessions: lambda wanted: store.sessions(wanted.move_id),
            ForgetSession: store.forget_session,
            LetFence: lambda wanted: store.let_fence(wanted.move_id),
            Sleep: lambda wanted: time.sleep(wanted.seconds),
            PublishControl: lambda wanted: streams.publish(wanted.stream, wanted.control),
            FindControl: streams.find,
            SetFenced: store.set_fenced,
            Switch: store.switch,
            SetAborting: lambda wanted: store.set_aborting(wanted, reason),
        }

    def run(self, steps: Steps) -> MoveStep:
        """Perform all steps; gives the move as it ended.

        Raises:
            RelatumError: what stopped it. A move that had begun stands as it was; its number is in the message and in
                the field `move_id`.
        """
        with otel.span(Part.MOVES, lambda: Description("relatum move")):
            try:
                with self._attending():
                    return run(steps, self._perform)
            except RelatumError as error:
                if self._known is None or self._known.state.is_ended:
                    raise
                raise _stopped(self._known, error) from error

    def _perform(self, request: MoveRequest) -> Any:
        answer = self._persist(request)
        if isinstance(answer, MoveStep):
            self._note(answer)
        return answer

    def _persist(self, request: MoveRequest) -> Any:
        """Perform a step, again while what it needs does not answer. Each may be repeated."""
        give_up_at, outages = time.monotonic() + self._retry_s, self._store.outages
        move = "a move to begin" if self._known is None else f"move {self._known.move_id}"
        who = f"the step {type(request).__name__} of {move}"
        while True:
            try:
                answer = self._ways[type(request)](request)
            except _PASSING as error:
                if time.monotonic() >= give_up_at:
                    outages.forget(who)
                    raise
                outages.failed(who, error)
            except BaseException:
                outages.forget(who)
                raise
            else:
                outages.over(who)
                return answer
            time.sleep(PAUSE_S)

    def _look(self, wanted: Look) -> MoveStep:
        self._store.attend(wanted.move_id, self._holder)
        return self._store.look(wanted.move_id)

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """Say, while the block runs, that somebody goes on with the move: a step may take longer than that holds."""
        over = threading.Event()
        thread = threading.Thread(target=self._attend, args=(over,), name="relatum attends a move", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()

    def _attend(self, over: threading.Event) -> None:
        who = f"saying that {self._holder} goes on with a move"
        while not over.wait(renewal_s(LEASE_S)):
            known = self._known
            if known is None or known.state.is_ended:
                continue
            try:
                self._store.keep_attending(known.move_id, self._holder)
            except Exception as error:  # noqa: BLE001 - where it lapses, another goes on with the move
                if not over.is_set():
                    self._store.outages.failed(who, error)
            else:
                self._store.outages.over(who)
        self._store.outages.forget(who)

    def _note(self, found: MoveStep) -> None:
        is_further = self._known is None or found.state is not self._known.state
        self._known = found
        if is_further:
            otel.note(Part.MOVES, partial(_told_of, found))
            self._tell(self._store.move(found.move_id))


def _told_of(move: MoveStep) -> dict[str, str | int]:
    """What a span tells of a move: not what its contexts are called, which are values of messages."""
    return {
        "relatum.move.id": move.move_id,
        "relatum.move.state": move.state.value,
        "relatum.move.source": move.source,
        "relatum.move.target": move.target,
        "relatum.move.contexts": len(move.contexts),
    }


def _stopped(move: MoveStep, error: RelatumError) -> RelatumError:
    """The error, saying which move stands still."""
    told: RelatumError = type(error)(
        f"move {move.move_id} stands still, {move.state.value}: {error}; go on with it, or abort it"
    )
    told.__dict__.update(error.__dict__, move_id=move.move_id)
    return told
