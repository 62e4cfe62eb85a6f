"""Whether the database defines a publisher's keys as it does: told by whoever asks it, read by who publishes."""

import threading
from typing import Final

from relatum.errors import RelatumError

AGREE_S: Final = 1.0
"""Seconds after which publishing does not wait for the database's first answer any more."""


class KeyAgreement:
    """What is known of it. Threads share one.

    Attributes:
        conflict: Why the keys are not, and will not be, what the publisher says: `KeyDefinitionConflict`, or
            `InvalidKeyDefinition` where there are too many. None while nobody knows of one.
    """

    def __init__(self) -> None:
        self.conflict: RelatumError | None = None
        self._asked = threading.Event()

    @property
    def is_asked(self) -> bool:
        """Whether the database was asked once, be it that it did not answer."""
        return self._asked.is_set()

    def tell(self, conflict: RelatumError | None) -> None:
        """Note what the database said last; None where it agrees, and where it is away and nothing was known before."""
        self.conflict = conflict
        self._asked.set()

    def wait(self, timeout_s: float = AGREE_S) -> None:
        """Wait until the database was asked, for so many seconds at most."""
        self._asked.wait(max(0.0, timeout_s))

    def check(self) -> None:
        """See that no conflict is known.

        Raises:
            KeyDefinitionConflict, InvalidKeyDefinition: one is. What was about to be published was not sent.
        """
        conflict = self.conflict
        if conflict is not None:
            # A new one each time: it is raised in many places, and carries where.
            raise type(conflict)(f"{conflict}; nothing was sent", **conflict.__dict__) from conflict
