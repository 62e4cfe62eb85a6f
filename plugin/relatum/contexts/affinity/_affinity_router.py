# Generated from _async_affinity_router.py by tools/make-twins: edit that, then "make twins".
"""Publishing to affinity sets: messages of one set go where its first one went."""

from typing import Any

from relatum.contexts.affinity._affinity_headers import NO_WISH, wish_of
from relatum.contexts.affinity._affinity_options import AffinityOptions
from relatum.contexts.affinity._set_keeping import Keeping
from relatum.contexts.placement._model import PartitionRow
from relatum.contexts.placement._placement_router import Router
from relatum.contexts.placement._sending import Sending
from relatum.store import AnyDatabase


class AffinityRouter(Router):
    """Publishes all messages of an affinity set to the partition where its first one went.

    A context manager; threads may share one, each with a channel of its own.

        with relatum.AffinityRouter("invoices", DATABASE_URL, AffinityOptions(balance="least_loaded")) as router:
            router.publish(channel, body, BasicProperties(headers={"affinity_set": "invoice 17"}))

    The set is named in a header. The partition of its first message is chosen by the rule and stored atomically, so
    that all who publish to it agree; it is remembered, so that further messages go there without asking. A message
    with the header `affinity_last: True` ends its set, one with `affinity_predecessor` joins that of another message,
    and those with neither are balanced by the rule and never wait for PostgreSQL.

    It can be given as the exchange on an intercepted channel: `channel.basic_publish(router, "", body, properties)`.

    Args:
        super_stream: The super stream's name.
        database: PostgreSQL's URL, or a `Database`, which stays the caller's.
        options: How it places and checks.
        broker: The broker's URL. None (default): that of the channel first published on.
        stream_url: Where the stream protocol answers, if not 120 ports below AMQP's.

    Raises:
        ConfigurationError: an option, or a URL, cannot be one.
        InvalidInput: the super stream's name cannot be one.
    """

    def __init__(
        self,
        super_stream: str,
        database: "AnyDatabase",
        options: AffinityOptions = AffinityOptions(),
        *,
        broker: str | None = None,
        stream_url: str | None = None,
    ) -> None:
        super().__init__(super_stream, database, options, AffinityOptions, broker=broker, stream_url=stream_url)
        self._sets = Keeping(self._core, self._settle_set, predecessors_max=options.predecessors_max)

    def _publish(self, sending: Sending) -> Any:
        core, sets = self._core, self._sets
        wish = wish_of(sending.headers, core.options.header)
        if wish is NO_WISH:
            return self._publish_of_none(sending)
        if not sets.knows(wish):
            self._connect(sending.source())
            place = sets.place_of(wish)
        else:
            # Nothing is awaited before the set's lock where its name is known: threads queue in the order they called.
            place = sets.place_of(wish)
        if place.name is None:
            return self._publish_of_none(sending, core.active(place.stream or ""))
        with self._locks(place.name):
            if sets.is_ending(place.name):
                self._run(core.publications.settle(place.name))
                sets.end_now(place.name)
            published = self._publish_locked(sending, place.name, stream=place.stream)
            sets.published(published, is_last=place.is_last, message_id=sending.message_id)
        return published.result

    def _publish_of_none(self, sending: Sending, partition: PartitionRow | None = None) -> Any:
        """Publish a message of no set, where its predecessor went or by the rule."""
        partition = partition or self._unnamed_partition(sending)
        result = self._publish_unnamed(sending, partition)
        self._sets.published_plain(partition, sending.message_id)
        return result

    def close(self) -> None:
        """Close the sets that have ended, check what is not checked yet, and give the connections back.

        Sets that have not ended stay open.

        Raises:
            ContextMoving, DatabaseUnavailable, BrokerUnavailable: as `check`; the connections are given back.
        """
        try:
            self._sets.close()
        finally:
            super().close()

    def _settle_set(self, name: str) -> None:
        self._settle_name(name)
