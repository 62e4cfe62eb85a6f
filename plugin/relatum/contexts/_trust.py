"""How long a publisher relies on its last look at the database, and how long a mover waits for those who do.

A publisher is told that its message counts, without another look, where by its clock, read after the confirm, its last
look began less than `TRUST_S` ago, and the placement is in force in what that look showed. A mover that knows `moving`
to be committed waits for `MOVE_WAIT_S` before its fence. So no fence lies before such a message:

- A look that began behind that commit shows `moving`: the message is not told of by it.
- A look that began before it has served for long when the fence is published.

Nobody registers for that, and no clock is compared with another one, or has to tell the time. Clocks must only go on at
the same rate, nearly, and not stand still while the world goes on. Source: docs/adr/0051.
"""

import os
import time
from typing import Final

TRUST_S: Final = 0.2
"""Seconds for which a look serves, from where it began."""

DRIFT: Final = 0.01
"""By how much a clock may be faster or slower than it should: quartz is within 0.0002, NTP changes rates by 0.0005."""

STALL_S: Final = 0.14
"""Seconds for which a publisher's clock may stand still with its machine, between its look and the fence."""

MOVE_WAIT_S: Final = TRUST_S * (1 + DRIFT) / (1 - DRIFT) + STALL_S
"""Seconds between the moment contexts are known to stop and the fence: 0.344, by the mover's clock."""


def elapsed_s() -> float:
    """Seconds since some moment, those included that the machine was suspended, where its system counts them."""
    return time.clock_gettime(_CLOCK) if _CLOCK is not None else time.monotonic()


_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", None) if os.name == "posix" else None
