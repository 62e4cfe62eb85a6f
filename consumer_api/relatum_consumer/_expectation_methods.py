"""The blocking face of expectations: the methods of `Relations` that say what is missing."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from datetime import datetime
from typing import ParamSpec, TypeVar

from relatum import metrics
from relatum.errors import RelatumError, StreamReplaced
from relatum.reading import BrokerAddress
from relatum.waiting import BACKOFF_S, Outages, Pauses, has_passed, may_repeat
from relatum_consumer import _missing as look_ups
from relatum_consumer._missing_watch import Following, logger
from relatum_consumer.expectations import POLL_S, UNMET_MAX, Expectation, MissingReport, UnmetExpectation
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.waiting import Rest, rested

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class ExpectationMethods(ABC):
    """What `Relations` offers for expectations, over its look-ups."""

    _catalog: Catalog
    _address: BrokerAddress

    @abstractmethod
    def _run(
        self,
        called: str,
        function: Callable[_Arguments, _Result],
        *args: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> _Result: ...

    def expectations(self) -> tuple[Expectation, ...]:
        """The expectations that are defined for this virtual host, in the order of their names."""
        return self._run("expectations", look_ups.defined, self._catalog)

    def missing(
        self,
        expectation: str | Expectation,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = UNMET_MAX,
    ) -> MissingReport:
        """The messages of a span of time that nothing has followed in time, and how sure that is.

        The messages themselves are read, so each that is named is there; what followed them is told by the index, and
        that nothing did by what is recorded. A call that looks at much needs more than the usual `timeout_s`: some
        seconds for 100,000 messages.

        Args:
            expectation: What is expected, by its name; or an `Expectation`, which need not be defined.
            since: Only messages of this time or later; a `datetime` without a zone is UTC. None (default): those that
                fell due within a day before `until`, as far back as they are recorded without a hole, and retained.
            until: Only messages before this time. None (default) for now.
            limit: Messages of each kind that are named at most, from 1 to 100,000; they are counted all the same.
                Default 1,000.

        Raises:
            NotFound: no expectation of that name is defined.
            KeyNotDefined: its key is not defined any more.
            StreamNotFound: neither the database nor the broker knows one of its streams, or it was deleted.
            TimeNotRecorded: the times of one of its streams are not recorded.
            InvalidInput: an argument is wrong.
        """
        return self._run("missing", look_ups.missing, self._catalog, expectation, since, until, limit)

    def watch_missing(
        self, expectation: str | Expectation, *, since: datetime | None = None, poll_s: float = POLL_S
    ) -> Generator[UnmetExpectation, None, None]:
        """The messages that nothing has followed in time, each as soon as that is known, and once.

        It never ends by itself. While a recorder is behind it waits for it, and it waits for servers that are away.
        What it remembers does not grow. A message that is recorded after it fell due is told of as well.

        Args:
            expectation: As for `missing`.
            since: The time of the first message to look at; None (default) for those that fall due from now on.
            poll_s: Seconds between two looks, more than 0. Default 1.

        Returns:
            An iterator; of late and missing messages, and of those of which it can never be known. Close it where it
            is left early.

        Raises:
            NotFound, KeyNotDefined, StreamNotFound, TimeNotRecorded, InvalidInput: as for `missing`; when it is
                iterated.
        """
        return rested(self._watch_missing(expectation, since, poll_s))

    def _watch_missing(
        self, expectation: str | Expectation, since: datetime | None, poll_s: float
    ) -> Generator[UnmetExpectation | Rest, None, None]:
        """As `watch_missing`; whoever iterates sees to it himself that he rests."""
        return self._each_missing(Following(self._catalog, expectation, since, poll_s))

    def _each_missing(self, following: Following) -> Generator[UnmetExpectation | Rest, None, None]:
        outages, pauses = Outages(logger, broker=str(self._address)), Pauses()
        who = f"watching for what the expectation {following.name!r} misses"
        metrics.report(following.counts, expectation=following.name)
        try:
            while True:
                found: list[UnmetExpectation] = []
                try:
                    found = self._run("watch_missing", following.step)
                except RelatumError as error:
                    # A recorder puts right what is said of a stream that was declared again.
                    if has_passed() or not (may_repeat(error) or isinstance(error, StreamReplaced)):
                        raise
                    following.failed(error)
                    outages.failed(who, error)
                    pause_s = min(pauses.after(error), BACKOFF_S[1])
                else:
                    outages.over(who)
                    pauses, pause_s = Pauses(), following.pause_s
                yield from found
                yield Rest(pause_s)
        finally:
            outages.forget(who)
            metrics.retire(following.counts)
