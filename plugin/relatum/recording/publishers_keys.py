"""Defining the keys of a publisher, and reporting if the database defines them differently."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

import sqlalchemy as sa

from relatum.errors import InvalidKeyDefinition, KeyDefinitionConflict, RelatumError
from relatum.keys import KeyAgreement, KeyDefinition
from relatum.store.catalog import add_keys, check_keys
from relatum.waiting import Outages, ended

LOOK_S: Final = 60.0
"""Seconds after which the definitions are compared again: others may have removed and redefined a key."""

_KEYS: Final = "defining the publisher's keys"

logger = logging.getLogger("relatum.recorder")


class PublishersKeys:
    """The keys of one publisher."""

    def __init__(
        self,
        engine: sa.Engine,
        definitions: Sequence[KeyDefinition],
        outages: Outages,
        *,
        defines: bool,
        look_s: float = LOOK_S,
    ) -> None:
        self.agreement = KeyAgreement()
        self._engine = engine
        self._definitions = definitions
        self._outages = outages
        self._defines = defines
        self._look_s = look_s
        self._look_at = 0.0
        self._has_agreed = False
        if not definitions:
            self.agreement.tell(None)

    def look(self) -> bool:
        """Ask the database when due; return True if it agrees, as far as known."""
        if not self._definitions or time.monotonic() < self._look_at:
            return True
        if self._has_agreed:
            self._look_at = time.monotonic() + self._look_s
        try:
            # Define only once: a key that is missing later was removed on purpose.
            ask = add_keys if self._defines else check_keys
            ask(self._engine, self._definitions)
        except (KeyDefinitionConflict, InvalidKeyDefinition) as error:
            if self.agreement.conflict is None:
                logger.warning("the database does not define the keys as this publisher does: %s", ended(error))
            self.agreement.tell(error)
            self._outages.over(_KEYS)
            return False
        except RelatumError as error:
            # Keep the last known result.
            self.agreement.tell(self.agreement.conflict)
            self._outages.failed(_KEYS, error)
            return False
        self._has_agreed, self._defines = True, False
        self._look_at = time.monotonic() + self._look_s
        if self.agreement.conflict is not None:
            logger.warning("the database defines the keys as this publisher does now")
        self.agreement.tell(None)
        self._outages.over(_KEYS)
        return True

    def due_s(self) -> float:
        """Return the seconds until the next query; endless if there are no keys."""
        return max(0.0, self._look_at - time.monotonic()) if self._definitions else threading.TIMEOUT_MAX
