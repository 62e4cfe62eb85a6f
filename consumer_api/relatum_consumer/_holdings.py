"""The blocking face of what there is: messages at their offsets, keys, streams, and a key's values."""

from collections.abc import Generator, Iterable

from relatum.errors import AccessRefused, NotFound
from relatum.ids import MessageId
from relatum.keys import KeyDefinition
from relatum.reading import Message
from relatum_consumer._asking import Asking
from relatum_consumer.lookups import look_up_in


class Holdings(Asking):
    """What `Relations` gives without looking for what belongs together."""

    # --- reading ------------------------------------------------------------------------------------------

    def read(self, stream: str, offset: int) -> Message:
        """The message at an offset of a stream.

        Raises:
            OffsetExpired: retention has dropped it; field `first` is the first offset retained.
            OffsetNotFound: the stream ends before it, or the broker used the offset itself.
            StreamNotFound: there is no such stream.
        """
        with look_up_in(stream, "read"):
            reader = self._open_reader()
            return reader.read(stream, offset)

    def read_many(
        self, ids: Iterable[MessageId | tuple[str, int]]
    ) -> Generator[Message | NotFound | AccessRefused, None, None]:
        """The messages of many ids, one after the other in the order of the ids; memory is bounded.

        Args:
            ids: (stream, offset) pairs, in any order and number, of any streams.

        Returns:
            For each id its message, or, as a value, the error that says why there is none.
        """
        return self._open_reader().read_many(MessageId(*each) for each in ids)

    # --- what there is ------------------------------------------------------------------------------------

    def keys(self) -> tuple[KeyDefinition, ...]:
        """The key definitions in force, by name, as they were known within the last second."""
        return self._run(self._lookups.keys())

    def streams(self) -> tuple[str, ...]:
        """The names of the streams that are recorded, in order, as they were known within the last second.

        A super stream's partitions are among them, itself is not.
        """
        return self._run(self._lookups.streams())

    def values(self, key: str, prefix: str = "", *, limit: int = 10) -> tuple[str, ...]:
        """The first recorded values of a key that begin with a prefix, in order, each once; in canonical form.

        It goes from value to value by the index, whatever number of messages share one. What retention has dropped
        counts until its rows are pruned. Where hundreds of values are of other virtual hosts, some may be left out.

        Args:
            key: The key's name; none of several parts.
            prefix: What they begin with; empty (default) for all.
            limit: Values at most, 1 to 1,000. Default 10.

        Raises:
            KeyNotDefined: no key of that name is defined.
            InvalidInput: an argument is wrong, or the key is composite.
        """
        return self._run(self._lookups.values(key, prefix, limit))
