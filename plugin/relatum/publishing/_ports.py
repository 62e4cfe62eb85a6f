"""What the interceptor needs of the recorder that runs inside its process."""

from collections.abc import Callable
from typing import Protocol

from relatum.ids import MessageId
from relatum.keys import KeyAgreement


class KeyKeeper(Protocol):
    """Who asks the database whether it defines the publisher's keys as the publisher does, in a thread of its own."""

    agreement: KeyAgreement

    def left(self) -> dict[str, int | None]:
        """How many messages of which streams are left for it to record; None where nobody knows. Asks no server."""

    def close(self) -> None:
        """Stop."""


class Recorder(KeyKeeper, Protocol):
    """The recorder beside a publisher: it works in a thread of its own, and none of its methods waits for a server."""

    def watch(self, exchange: str | bytes, routing_key: str | bytes) -> None:
        """Record the streams this exchange and routing key lead to, from now on. Cheap where already known."""

    def subscribe(self, receipt: str, listener: Callable[[MessageId], None]) -> Callable[[], None]:
        """Call `listener` (in the recorder's thread) for each place recorded for that receipt."""

    def close(self) -> None:
        """Finish the batch at hand and stop."""
