"""The blocking message collector."""

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
    """Collects messages into bulks by type, calls executors with them, and stores the outcome of each message.

    A context manager: entering starts it, leaving closes it. Thread-safe. All collectors with one name, in any number
    of processes, are members of one collector: they share its streams and take over from each other.

    Args:
        name: The collector's name.
        broker: The broker's URL, or a `Broker`. None (default): no streams, "spill", takeover or dead-letter stream.
        database: PostgreSQL's URL, or a `Database`.
        streams: Streams and super streams to follow; each message is collected exactly once. Default: none.
        start: Where to begin in a stream that this collector never followed: "first" (default), "next" or an offset.
        bytes_max: Maximum bytes of all held messages. Default: 64 MiB.
        bulks_max: Maximum number of bulks being filled. Default: 64.
        dead_letter_stream: An existing stream or queue for messages whose attempts all failed. None (default): none.
        type_of: A function that returns a message's type, or None to pass it over. Default: the property `type`.
        lease_s: Seconds after which others take over from a dead member, at least 1. Default: 15.
        keep_s: Seconds before a finished message is deleted and its outcome is unknown again. Default: 7 days. None:
            never. The member that joined last decides.

    Raises:
        InvalidInput: An argument has the wrong type, or is out of range.
        ConfigurationError: An argument needs a broker, and none was given.
    """

    def _called_in_thread(self, executor: Executor) -> Executor:
        self._check_awaited(executor)
        return executor

    def _check_awaited(self, called: Callable[..., object]) -> None:
        if is_coroutine_function(called):
            raise InvalidInput(f"the coroutine function {called!r} is not awaited here: use AsyncMessageCollector")

    # --- messages in --------------------------------------------------------------------------------------------------

    def collect(self, message: Message, *, timeout_s: float | None = None) -> bool:
        """Collect a message. The collector stores it a moment later, and then calls handlers.

        Args:
            message: A message of a stream. Stream and offset identify it: if you give it twice, it is consumed once.
            timeout_s: Seconds to wait for room; 0 refuses at once, None (default) waits without limit. A call from a
                handler of `collected` never waits, since storing continues only after it. An executor must not wait
                without limit for room of its own type, which it frees only by returning.

        Returns:
            False if the message was refused and is not stored: its type has no executor, there was no room in time, or
            the collector is closing.

        Raises:
            ConfigurationError: The collector is not running.
            InvalidInput: The argument is not a message of a stream.
        """
        return self.collect_many([message], timeout_s=timeout_s)[0]

    def collect_many(self, messages: Iterable[Message], *, timeout_s: float | None = None) -> list[bool]:
        """Collect messages in order; see `collect`.

        Args:
            messages: The messages.
            timeout_s: Seconds to wait for room, in total. None (default): without limit.

        Returns:
            Whether each message was taken.
        """
        described = self._described(messages, timeout_s)
        if self._is_storer:
            timeout_s = 0.0
        shared, refused = self._shared, partial(self._refused, len(described))
        return self._result_of(shared.collect, described, timeout_s, otherwise=refused)

    def flush(self, type: str | None = None) -> None:  # noqa: A002
        """Close the bulks being filled, of a type or of all types. They contain all messages taken before the call.

        Waits until these are stored, except in a handler of `collected`, since storing continues only after it.

        Raises:
            InvalidInput: The type has no executor here.
        """
        self._check_flushed(type)
        self._result_of(self._shared.flush, type, not self._is_storer, otherwise=lambda: None)

    # --- state --------------------------------------------------------------------------------------------------------

    def outcome(self, message_id: str) -> Outcome:
        """Return the outcome of a message of this collector, stored by any member."""
        checked_name("message_id", message_id)
        return self._shared.store.outcomes_of([message_id])[message_id]

    # --- start and end ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join as a member, and start to collect.

        Raises:
            BrokerUnavailable, DatabaseUnavailable: A server is unreachable; safe to retry.
            StreamNotFound: The dead-letter stream is missing. A missing stream to follow is logged and waited for.
            NotAStream: A stream to follow is a queue of another type.
            SchemaMissing: The database has no schema: run `relatum migrate`.
            ConfigurationError: The collector was started before, has streams but no executor, or would publish dead
                letters to a stream that it follows.
        """
        self._check_startable()
        self._begin(self._join_members())

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Refuse new messages, close all bulks, and wait for the executors. Idempotent.

        Messages that are not finished in time, or wait for a retry, are left to other members or the next start.

        Args:
            timeout_s: Seconds to wait for executors, by default 30; at most five more if PostgreSQL does not answer.

        Returns:
            Whether all bulks were consumed in time. Always False in an executor or a handler, which cannot wait for
            itself: the collector then closes in the background.
        """
        checked_seconds("timeout_s", timeout_s)
        if not self._is_started:
            return True
        if self._is_own:
            self._close_behind(timeout_s)
            return False
        return self._close(timeout_s)

    def run(self, stop: threading.Event) -> None:
        """Start, waiting for unreachable servers; run until `stop` is set; close.

        Raises:
            RelatumError: An error that waiting does not cure; see `start`.
        """
        checked_event("stop", stop)
        who = self._shared.label("starting")
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
            # Also after Ctrl-C.
            self.close()

    def __enter__(self) -> Self:
        self.start()
        return self
