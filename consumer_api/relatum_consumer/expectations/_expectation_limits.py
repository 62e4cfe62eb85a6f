"""Limits of expectations, each with its unit and where it comes from."""

from typing import Final

GRACE_S: Final = 1.0
"""Seconds by which clocks may differ, unless told otherwise: machines that are kept in step differ by less."""

GRACE_S_MAX: Final = 86_400.0
"""Seconds that anybody's clock may be wrong by: a day, as of one that takes its own zone's time for UTC."""

UNMET_MAX: Final = 1_000
"""Messages of each finding that a report holds, unless told otherwise."""

BATCH: Final = 1_000
"""Messages after which the index is asked what followed them: one statement of some milliseconds."""

PIECE: Final = 2_048
"""Offsets read in one go: one attach, and some ten milliseconds."""

PAGE_BLOCKS: Final = 2_048
"""Blocks of the time index asked for at once: a quarter of a million messages, half a megabyte of blocks."""

SPAN_S: Final = 86_400
"""Seconds of what was due that are looked at, unless told otherwise: a day."""

STEP_MESSAGES: Final = 50_000
"""Messages a follower looks at in one step, about two seconds: what it has found is told behind each."""

POLL_S: Final = 1.0
"""Seconds between a follower's looks, unless told otherwise."""
