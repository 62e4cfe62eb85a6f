"""What the commands of contexts and of affinity sets are told alike."""

from dataclasses import dataclass

from relatum.contexts import AffinitySets, SerializationContexts
from relatum.terminal import BrokerOption, DatabaseOption, JsonOption, ServerOptions, require_database


@dataclass(frozen=True, slots=True)
class ContextsServers(ServerOptions):
    """Where a super stream's contexts are."""

    def contexts(self, super_stream: str) -> SerializationContexts:
        """The contexts of a super stream; a broker is only asked where the database does not know it yet."""
        return SerializationContexts(super_stream, self.database_url, broker=self.broker, stream_url=self.stream_url)

    def looked_at(self, super_stream: str) -> SerializationContexts:
        """The contexts as the database has them, and nothing is written; the broker only tells the virtual host."""
        vhost = "/" if self.broker is None else self.address.vhost
        return SerializationContexts(super_stream, self.database_url, vhost=vhost)

    def moving(self, super_stream: str) -> SerializationContexts:
        """The contexts of a super stream, with a broker."""
        url, database = self.broker_url, self.database_url
        return SerializationContexts(super_stream, database, broker=url, stream_url=self.stream_url)


@dataclass(frozen=True, slots=True)
class ContextsOptions(ContextsServers):
    """Where a super stream's contexts are, and whether to print JSON."""

    as_json: JsonOption = False


@dataclass(frozen=True, slots=True)
class SetsOptions:
    """Where a super stream's affinity sets are, and whether to print JSON."""

    broker: BrokerOption = None
    database: DatabaseOption = None
    as_json: JsonOption = False

    def sets(self, super_stream: str) -> AffinitySets:
        """The sets of a super stream."""
        return AffinitySets(super_stream, require_database(self.database), broker=self.broker)
