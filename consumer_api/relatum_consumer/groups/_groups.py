"""The blocking face of groups: the methods of `Relations` that read them."""

from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, Unpack, overload
from weakref import WeakSet

from relatum.membership import GroupPosition
from relatum.reading import BrokerAddress
from relatum.waiting import within
from relatum_consumer.groups import _one_group as look_ups
from relatum_consumer.groups._assembly import GroupOrder
from relatum_consumer.groups._consumer import GroupConsumerStatus, consumer_names, consumer_status
from relatum_consumer.groups._finding import whole_groups
from relatum_consumer.groups._group import Group, GroupPage, IncompleteGroupReport
from relatum_consumer.groups._options import (
    GroupArguments,
    GroupConsumer,
    GroupOptions,
    SharedOptions,
    SharingArguments,
    consumer_of,
)
from relatum_consumer.groups._shared_groups import SharedGroups
from relatum_consumer.lookups.answer import Answer
from relatum_consumer.lookups.arguments import Names, names_of
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.telemetry import look_up
from relatum_consumer.lookups.waiting import Rest, rested

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class GroupMethods:
    """What `Relations` offers for groups, over its look-ups."""

    _catalog: Catalog
    _address: BrokerAddress
    _timeout_s: float
    _sharing: "WeakSet[SharedGroups]"

    # --- many groups --------------------------------------------------------------------------------------

    @overload
    def groups(
        self, streams: Names = None, *, consumer: None = None, **options: Unpack[GroupArguments]
    ) -> Generator[Group, None, None]: ...
    @overload
    def groups(
        self, streams: Names = None, *, consumer: str | GroupConsumer, **options: Unpack[SharingArguments]
    ) -> SharedGroups: ...
    def groups(
        self,
        streams: Names = None,
        *,
        consumer: str | GroupConsumer | None = None,
        **options: Any,
    ) -> Generator[Group, None, None] | SharedGroups:
        """Whole groups, one after the other, whatever order and streams their messages lie in.

        What is complete when this is called is given in the order of groups. With `follow`, groups that complete later
        are given as they do, also where they stand before one that was given already: none is lost, and each is given
        once. Groups lie in memory by their places; of their messages, 64 MiB and one group are held at most, and up to
        1 GiB in a file, as by `StreamReader.read_many`.

        Args:
            streams: The streams and super streams to look in; None for all that are recorded. A group counts only
                with its messages in these.
            consumer: The name under which several processes share the groups and go on where they were, or a
                `GroupConsumer` with its options. Gives `SharedGroup`s, each to be acknowledged, of what is recorded;
                `complete` stays as it is. None (default): nothing is remembered.
            **options: What follows, each by its name.
            order: "logical" (default): a group stands where its message 1 stands, its messages are in the order of
                their numbers. "physical": a group stands where the first of its messages to arrive stands, its
                messages are in the order of arrival. In a stream, that is the order of offsets; streams are merged by
                the messages' times, then by name.
            start: Where to begin: an offset, where one stream is named; a `datetime` (without a zone UTC), for groups
                whose place has that time or a later one; None for the first message. A group that stands before it is
                left out, one that stands behind it is whole even if some of its messages lie before it.
            complete: True (default) also reads what is retained and not recorded yet, so that every group that was
                complete is given. False takes what is recorded.
            follow: True goes on with what comes later, from the recorded part of the streams. Default False.
            idle_timeout_s: With `follow`: ends when no group came for so many seconds; None (default) waits for ever.
            on_duplicate: What becomes of a number that several messages have: "first" (default) takes the one that
                arrived first and keeps the others in `Group.duplicates`; "raise" raises `GroupConflict`. A message
                that an exchange routed to several streams is no duplicate.
            on_conflict: What becomes of a group that has all its numbers, but two lasts, numbers past the last, or
                messages that retention has dropped: "raise" (default) raises `GroupConflict` at its turn, and the
                iteration is over; "skip" passes it over; "dead_letter" publishes its messages to the dead-letter stream
                of a consumer.

        Returns:
            An iterator; use `contextlib.closing` where it is left early. With a consumer it is a context manager that
            does.

        Raises:
            KeyNotDefined: the key `message_group` is not defined: groups cannot be found.
            StreamNotFound: neither the database nor the broker knows a stream, or it was deleted.
            GroupConflict: see `on_duplicate` and `on_conflict`. A consumer's group was given back.
            ConfigurationError: the consumer reads other streams, or in another order.
            InvalidInput: an argument is wrong, or far too much is not recorded.
        """
        names = names_of("streams", streams)
        if consumer is not None:
            return self._share(SharedOptions(names, consumer=consumer_of(consumer), **options))
        return rested(self._groups(names, **options))

    def _groups(
        self, names: tuple[str, ...] | None, **options: Unpack[GroupArguments]
    ) -> Generator[Group | Rest, None, None]:
        """As `groups`, with the pauses among the groups: the caller waits them out."""
        return whole_groups(self._catalog, GroupOptions(names, **options))

    def incomplete_groups(
        self, streams: Names = None, *, older_than: timedelta | float, complete: bool = True
    ) -> list[IncompleteGroupReport]:
        """The groups that are not complete, or contradict themselves, oldest first: what is there, what is missing.

        Definite, unless told `complete=False`: what is retained and not recorded yet is read. A group that was complete
        and is being dropped by retention is none of them, as long as its rows are not pruned; afterwards its first
        numbers show as missing.

        Args:
            streams: As for `groups`.
            older_than: How long ago the first message must have come, by its time: a `timedelta` or seconds. Messages
                of unknown time count as old.
            complete: True (default) also reads what is retained and not recorded yet, which is all of a stream where
                the key was defined later. False takes what is recorded.

        Raises:
            KeyNotDefined, StreamNotFound: as for `groups`.
            InvalidInput: an argument is wrong, or there are more than 100,000.
        """
        with look_up("incomplete_groups") as told:
            found = look_ups.incomplete(self._catalog, streams, older_than, complete=complete)
            told(found)
            return found

    # --- one group ----------------------------------------------------------------------------------------

    def group(
        self, group_id: str, *, streams: Names = None, order: GroupOrder = "logical", complete: bool = True
    ) -> Group:
        """What there is of one group, complete or not: `group.position` says how far it is and what is wrong.

        Args:
            group_id: 48 hexadecimal digits.
            streams: As for `groups`.
            order: As for `groups`.
            complete: True (default) also reads what is retained and not recorded yet.

        Returns:
            The group; without any message where there is none.

        Raises:
            InvalidGroup: that is no group's id.
            KeyNotDefined, StreamNotFound: as for `groups`.
            NothingRecorded: no stream was named, and none of this virtual host is recorded: nothing can be known.
        """
        return self._finish("group", look_ups.group, self._catalog, group_id, streams, order, complete=complete)

    def grouped(self, group_id: str, sequence: int, *, streams: Names = None, complete: bool = False) -> Answer:
        """The messages of one number of a group: one, or several where it has duplicates, oldest first.

        Args:
            group_id: 48 hexadecimal digits.
            sequence: The number, from 1 to 999,999,999.
            streams: As for `groups`.
            complete: As for `find`.

        Returns:
            The messages and the status, as from `find`.

        Raises:
            InvalidGroup: that is no group's id, or no number.
            KeyNotDefined, StreamNotFound: as for `groups`.
        """
        return self._finish("grouped", look_ups.grouped, self._catalog, group_id, sequence, streams, complete=complete)

    def group_position(self, group_id: str, *, streams: Names = None, complete: bool = True) -> GroupPosition:
        """How far a group is: what a publisher needs to go on with it after a failure.

        Args:
            group_id: 48 hexadecimal digits.
            streams: As for `groups`. Who goes on with the group names where its messages go: None (default) means the
                streams that the database knows, which after a kill may lack one that was just begun, and then
                `MessageGroup.resume` refuses the position.
            complete: True (default) also reads what is retained and not recorded yet: going on from a position that is
                behind makes duplicates.

        Returns:
            The position, and which streams it is of; of a group of which there is nothing, that of one that begins.

        Raises:
            InvalidGroup: that is no group's id.
            KeyNotDefined, StreamNotFound: as for `groups`.
            NothingRecorded: no stream was named, and none of this virtual host is recorded: nothing can be known.
        """
        return self._finish("group_position", look_ups.position, self._catalog, group_id, streams, complete=complete)

    # --- sharing groups -----------------------------------------------------------------------------------

    def group_consumers(self) -> tuple[str, ...]:
        """The names of the consumers that share groups in this virtual host, in order."""
        return self._finish("group_consumers", consumer_names, self._catalog)

    def group_consumer_status(self, name: str) -> GroupConsumerStatus:
        """What is known of a consumer that shares groups: its groups by state, its members, its streams with their lag.

        All groups the consumer knows are counted: a second for some millions that are done.

        Args:
            name: The consumer's name.

        Raises:
            NotFound: nobody has read under that name.
        """
        return self._finish("group_consumer_status", consumer_status, self._catalog, name)

    def _share(self, options: SharedOptions) -> SharedGroups:
        shared = SharedGroups(self._catalog, self._address, options)
        self._sharing.add(shared)
        return shared

    def _newest_groups(self, streams: Names = None, *, before: str | None = None, limit: int = 100) -> GroupPage:
        """A page of the groups as they are recorded, complete or not, for the page and the command.

        By the index: a page costs as much of a thousand groups as of a billion. The newest first, by their ids, which
        begin with the time they were made at. `before` is `next` of the page before; a `limit` of 0 asks only what is
        not recorded. Where streams are named, a page may have fewer groups, and still a next one.
        """
        return self._finish("newest_groups", look_ups.newest, self._catalog, streams, before, limit)

    def _finish(
        self,
        called: str,
        function: Callable[_Arguments, _Result],
        *args: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> _Result:
        """One call, in its time; what the function returns."""
        with within(self._timeout_s), look_up(called) as told:
            result = function(*args, **options)
            told(result)
            return result
