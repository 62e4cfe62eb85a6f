"""The methods of `Relations` that find messages by time."""

from datetime import datetime

from relatum.reading import Message
from relatum_consumer.lookups.answer import Answer
from relatum_consumer.lookups.arguments import Names
from relatum_consumer.lookups.by_time import around, beside, window
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.consumed import Consumed
from relatum_consumer.lookups.telemetry import Lookups


class TimeMethods:
    """The methods of `Relations` that find messages by time."""

    _catalog: Catalog
    _lookups: Lookups

    def after(
        self,
        moment: Message | Consumed | datetime,
        stream: str,
        *,
        by: str | None = None,
        inclusive: bool = False,
        complete: bool = False,
    ) -> Answer:
        """Return the next message in time in a stream, even if times are not in the order of offsets.

        In the message's own stream, equal times are ordered by offset (in its super stream by partition, then offset),
        so that repeated calls pass every message once. In another stream, or from a `datetime`, the next message is
        strictly later.

        Args:
            moment: A message read or consumed, for its time; or a `datetime` (without a zone: UTC). If a consumed
                message does not say its stream and offset, only its time counts: its own copies can be found.
            stream: The stream or super stream to search.
            by: A key: only messages that share its value with the message. Needs a message.
            inclusive: True accepts an equal time in another stream: the message with the lowest offset.
            complete: True also reads retained messages that are not recorded yet; False is exact for the recorded
                messages.

        Returns:
            At most one message, with the status.

        Raises:
            TimeNotRecorded: recording times is switched off for the stream.
            InvalidInput: the message has no time.
        """
        return self._lookups.run(
            "after", beside, self._catalog, "after", moment, stream, by, inclusive=inclusive, complete=complete
        )

    def before(
        self,
        moment: Message | Consumed | datetime,
        stream: str,
        *,
        by: str | None = None,
        inclusive: bool = False,
        complete: bool = False,
    ) -> Answer:
        """Return the previous message in time in a stream: the mirror of `after`.

        With `inclusive`, it takes the message with the highest offset among several of an equal time.
        """
        return self._lookups.run(
            "before", beside, self._catalog, "before", moment, stream, by, inclusive=inclusive, complete=complete
        )

    def nearest(
        self, moment: Message | Consumed | datetime, stream: str, *, by: str | None = None, complete: bool = False
    ) -> Answer:
        """Return the message nearest in time in a stream, never the message itself.

        An equal time is nearest. The earlier of two equally near messages wins; among several of one time at or before
        the moment, the highest offset, as for `before(…, inclusive=True)`. In the message's own stream, messages of the
        same time at a higher offset count as later: the first of them is taken if none comes before. Arguments, result
        and errors are those of `after`.
        """
        return self._lookups.run("nearest", beside, self._catalog, "nearest", moment, stream, by, complete=complete)

    def window(
        self,
        moment: Message | Consumed | datetime,
        stream: str,
        *,
        before_s: float = 0.0,
        after_s: float = 0.0,
        by: str | None = None,
        complete: bool = False,
    ) -> Answer:
        """Return all messages of a stream around a moment, without the message itself, by time, partition and offset.

        Args:
            moment: As for `after`.
            stream: As for `after`.
            before_s: Seconds before the moment, from 0 on, inclusive.
            after_s: Seconds after the moment, from 0 on, inclusive.
            by: As for `after`.
            complete: As for `after`.

        Raises:
            TimeNotRecorded: as for `after`.
        """
        return self._lookups.run(
            "window", window, self._catalog, moment, stream, before_s, after_s, by, complete=complete
        )

    def around(
        self,
        moment: Message | Consumed | datetime,
        streams: Names = None,
        *,
        before_s: float = 0.0,
        after_s: float = 0.0,
        limit: int | None = None,
        complete: bool = False,
    ) -> Answer:
        """Return all messages of several streams around a moment, merged by time.

        Messages of one time are ordered by stream, shorter names first (`r-2` before `r-10`), then offset.

        Args:
            moment: A `datetime` (without a zone: UTC), or a message read or consumed, for its time; it is included.
            streams: The streams and super streams to search. None: all streams that are recorded with their times.
            before_s: As for `window`.
            after_s: As for `window`.
            limit: The most messages to return, nearest to the moment first. None: all, up to 100,000.
            complete: As for `after`.

        Raises:
            TimeNotRecorded: as for `after`, for a named stream.
        """
        return self._lookups.run(
            "around", around, self._catalog, moment, streams, before_s, after_s, limit, complete=complete
        )
