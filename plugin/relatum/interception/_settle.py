"""Settling an outcome that is not known, by reading the streams the message was sent to."""

import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from relatum._ids import MessageId
from relatum.errors import ConfigurationError, PublishOutcomeUnknown, PublishRejected, Transient
from relatum.interception._locate import Locator, Sent

CLOCK_SKEW_S: Final = 60
"""Seconds the broker's clock may be behind ours: a search begins that long before the message was sent."""

WAIT_S: Final = 10.0
"""Seconds to look for a message by default, at least."""

_POLL_S: Final = 0.1

_HEARTBEATS_UNTIL_GIVEN_UP: Final = 3
"""Heartbeat intervals without a byte after which RabbitMQ has closed a connection: it closes between 2 and 3."""


def final_at(heartbeat_s: int, *, announced: bool) -> float | None:
    """From when on nothing sent by a lost connection can arrive any more, on `time.monotonic()`'s scale.

    Args:
        heartbeat_s: The heartbeat the connection negotiated; 0: none, then it is never known.
        announced: The broker itself closed the channel or the connection: it takes nothing more from it.
    """
    if announced:
        return time.monotonic() + 1
    return time.monotonic() + _HEARTBEATS_UNTIL_GIVEN_UP * heartbeat_s + 1 if heartbeat_s else None


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A message whose outcome is not known, and what is needed to find out.

    Attributes:
        sent: What was sent.
        locator: What reads its streams.
        final_at: On `time.monotonic()`'s scale, from when on its absence from a stream is a proof: the broker has
            then given up the connection it was sent by, so it cannot arrive any more. None: never.
    """

    sent: Sent
    locator: Locator
    final_at: float | None

    def settle(self, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> tuple[MessageId, ...]:
        """Find out by reading the streams whether the message is in them.

        Args:
            timeout_s: Seconds to look for it; None (default) as long as it takes to be sure, at least `WAIT_S`.
            streams: Where to look; by default, where exchange and routing key lead.

        Returns:
            Its places, one for each stream it is in, by the stream's name.

        Raises:
            PublishRejected: it is in no stream and cannot arrive any more: safe to publish again.
            PublishOutcomeUnknown: not found in time, and it may still arrive, or the streams cannot be read.
            ConfigurationError: the streams cannot be known: name them.
        """
        if timeout_s is None:
            timeout_s = WAIT_S if self.final_at is None else max(WAIT_S, self.final_at + 5 - time.monotonic())
        deadline = time.monotonic() + timeout_s
        searches: dict[str, _Search] = {name: _Search(self, name) for name in streams}
        while True:
            began = time.monotonic()
            with suppress(Transient):
                searches = searches or self._searches()
                for search in searches.values():
                    search.go_on()
                found = tuple(sorted(search.place for search in searches.values() if search.place))
                if searches and len(found) == len(searches):
                    return found
                if self.final_at is not None and began >= self.final_at:
                    return found or self._raise_absent()
            if time.monotonic() >= deadline:
                found = tuple(sorted(search.place for search in searches.values() if search.place))
                return found or self._raise_unknown(timeout_s)
            time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))

    def _searches(self) -> "dict[str, _Search]":
        expected = self.locator.routes(self.sent)
        if expected is None:
            raise ConfigurationError(
                f"the streams that exchange {self.sent.exchange!r} leads to cannot be known here: settle(streams=…)"
            )
        if not expected:
            raise ConfigurationError(f"{self.sent.routing_key!r} is no stream: its messages cannot be read again")
        return {name: _Search(self, name) for name in expected}

    def _raise_absent(self) -> Any:
        raise PublishRejected(
            f"the message {self.sent.message_id} is in no stream and cannot arrive any more: publish it again",
            in_stream=False,
        )

    def _raise_unknown(self, timeout_s: float) -> Any:
        raise PublishOutcomeUnknown(
            f"the message {self.sent.message_id} was not found within {timeout_s:.1f} s; it may still arrive",
            in_stream=None,
            settle=self.settle,
        )


class _Search:
    """One stream's part of settling: reads on from where it last ended."""

    def __init__(self, unsettled: Unsettled, stream: str) -> None:
        self._unsettled = unsettled
        self._stream = stream
        self._next: int | datetime = unsettled.sent.sent_at - timedelta(seconds=CLOCK_SKEW_S)
        self.place: MessageId | None = None

    def go_on(self) -> None:
        """Read to the stream's present end, or to the message."""
        if self.place is not None:
            return
        for offset, is_it in self._unsettled.locator.search(self._unsettled.sent, self._stream, self._next):
            if is_it:
                self.place = MessageId(self._stream, offset)
                return
            self._next = offset + 1
