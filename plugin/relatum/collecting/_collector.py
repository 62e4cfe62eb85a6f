"""The message collector, with threads."""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Self

from relatum.checks import checked_event, checked_name, checked_seconds
from relatum.closing import Closing
from relatum.collecting._async_collector import is_coroutine_function
from relatum.collecting._bulk import Executor
from relatum.collecting._collector_base import CLOSE_S, Collector
from relatum.errors import InvalidInput, Transient
from relatum.outcomes import Outcome
from relatum.reading import Message
from relatum.waiting import AfterStop, backoff, within


class MessageCollector(Collector[Executor], Closing):
    """Hands messages to executors in bulks, by type, and keeps what became of each.

    A context manager: entering starts it, leaving closes it. Threads may share it. Collectors of one name, in any
    number of processes, are members of one collector: they share its messages, and take over from one another.

    Args:
        name: The collector's name.
        database: PostgreSQL's URL, or a `Database`.
        broker: The broker's URL or address; None where no stream is followed, nothing is spilled or taken over, and
            there is no dead-letter stream.
        stream_url: The stream protocol's URL, where it cannot be told from the broker's.
        ssl_context: The TLS context for the broker; None: what its URL says, or the system's authorities.
        auth_mechanism: "PLAIN" logs in with user and password, "EXTERNAL" with the client certificate; None: what the
            broker's URL says, or PLAIN.
        streams: Streams and super streams to follow; each message of them is collected exactly once.
        start: Where to begin with a stream that this collector never followed: "first", "next", or an offset.
        bytes_max: Bytes of all messages held.
        bulks_max: Bulks being filled at one time.
        dead_letter_stream: Where messages are published that are given up. It must exist.
        type_of: Tells a message's type; by default its property `type`.
        lease_s: Seconds after which others take over from a member that died.
        keep_s: Seconds a finished message is remembered, then it is unknown again; None for ever. The member that
            joined last decides.

    Raises:
        InvalidInput: An option cannot be one.
        ConfigurationError: An option needs a broker that was not given.
    """

    def _called_in_thread(self, executor: Executor) -> Executor:
        self._check_awaited(executor)
        return executor

    def _check_awaited(self, called: Callable[..., object]) -> None:
        if is_coroutine_function(called):
            raise InvalidInput(f"nobody would await {called!r}: a coroutine function is for AsyncMessageCollector")

    # --- messages in ----------------------------------------------------------------------------------------------

    def collect(self, message: Message, *, timeout_s: float | None = None) -> bool:
        """Take a message; it is stored soon after, and its handlers are told.

        Args:
            message: A message that lies in a stream. Its place is its identity: given twice, it is consumed once.
            timeout_s: Seconds to wait for room; 0 refuses at once, None waits for as long as it takes. A handler of
                `collected` never waits: storing goes on only after it. An executor may wait in vain for room of its
                own type: that is made when it returns.

        Returns:
            False where it was refused, and nothing is stored: its type has no executor, there was no room in time, or
            the collector stops.

        Raises:
            ConfigurationError: The collector does not run.
            InvalidInput: It is no message of a stream.
        """
        return self.collect_many([message], timeout_s=timeout_s)[0]

    def collect_many(self, messages: Iterable[Message], *, timeout_s: float | None = None) -> list[bool]:
        """Take messages, in order; see `collect`.

        Args:
            messages: The messages.
            timeout_s: Seconds to wait for room, in all.

        Returns:
            For each message, whether it was taken.
        """
        described = self._described(messages, timeout_s)
        if self._is_storer:
            timeout_s = 0.0
        shared, refused = self._shared, partial(self._refused, len(described))
        return self._result_of(shared.collect, described, timeout_s, otherwise=refused)

    def flush(self, type: str | None = None) -> None:  # noqa: A002
        """Close the bulk being filled of a type, or of all, with everything in it that was taken before.

        Waits until that is stored; except in a handler of `collected`, after which alone storing goes on.

        Raises:
            InvalidInput: The type has no executor here.
        """
        self._check_flushed(type)
        self._result_of(self._shared.flush, type, not self._is_storer, otherwise=lambda: None)

    # --- what it knows --------------------------------------------------------------------------------------------

    def outcome(self, message_id: str) -> Outcome:
        """What became of a message of this collector, by any member."""
        checked_name("message_id", message_id)
        return self._shared.store.outcomes_of([message_id])[message_id]

    # --- its life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the collector's members, and begin.

        Raises:
            BrokerUnavailable, DatabaseUnavailable: a server is away; safe to repeat.
            StreamNotFound: there is no dead-letter stream of that name. A stream to follow that is missing is waited
                for, and logged.
            NotAStream: what is to be followed is a queue of another kind.
            SchemaMissing: the database has no schema: run `relatum migrate`.
            ConfigurationError: it was started before; streams are to be followed, but there is no executor; or dead
                letters would go to a stream that is followed.
        """
        self._check_startable()
        self._begin(self._join_members())

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Stop in order: take nothing more, close all bulks, and wait for the executors.

        What is not done in time, and what waits for a retry, is left to the other members, or to the next start.

        Args:
            timeout_s: Seconds to wait for executors. Where PostgreSQL does not answer, five more pass at most.

        Returns:
            Whether everything closed was consumed in time. False in an executor or a handler, which cannot wait for
            itself: it is closed in the background then. Closed again, it answers the same.
        """
        checked_seconds("timeout_s", timeout_s)
        if not self._is_started:
            return True
        if self._is_own:
            self._close_behind(timeout_s)
            return False
        return self._close(timeout_s)

    def run(self, stop: threading.Event) -> None:
        """Start, waiting for servers that are away; go on until `stop` is set; close.

        Raises:
            RelatumError: what waiting would not cure; see `start`.
        """
        checked_event("stop", stop)
        who = self._shared.who("starting")
        for pause in backoff():
            try:
                with within(AfterStop(stop)):
                    self.start()
                self._shared.outages.over(who)
                break
            except Transient as error:
                self._shared.outages.failed(who, error)
            if stop.wait(pause):
                return
        try:
            stop.wait()
        finally:
            # Also where a signal's handler raised, as Ctrl-C does.
            self.close()

    def __enter__(self) -> Self:
        self.start()
        return self
