"""Every limit of look-ups, by name, with its unit and where it comes from."""

from typing import Final

ANSWER_MESSAGES_MAX: Final = 100_000
"""Messages of one answer, which is held in memory. What has more is asked for with `limit=`, or a span of time."""

VALUES_MAX: Final = 1_000
"""Values of a key that are listed at once."""

VALUES_STEPS: Final = 200
"""Places of the index that are looked at for them beyond their number: those of other virtual hosts, or replaced."""

TIMES_ROWS_MAX: Final = 50_000
"""Rows of a value that are looked at to count them by time: less than a tenth of a second, and a page waits for it."""

TIMES_SPANS_MAX: Final = 1_000
"""Spans of time they are counted by."""

ANSWER_BYTES_MAX: Final = 1 << 30
"""Bytes of the messages of one answer that was asked for without `limit=`; each counts `MESSAGE_BYTES` more."""

POOL_MAX: Final = 1_000
"""Connections to PostgreSQL one `Relations` can be told to keep; a server has a hundred for all, unless told."""

CATALOG_AGE_S: Final = 1.0
"""Seconds for which key definitions are taken from memory: recorders take new ones up at the same pace."""

IDENTIFY_S: Final = 60.0
"""Seconds after which a broker that did not say which one it is is asked again."""

UNUSABLE_S: Final = 5.0
"""Seconds for which a stream that is not the recorded one is left out where none is named: a recorder puts it right."""

POLL_S_MIN: Final = 0.005
"""The first pause between two questions to the index for all who wait, in seconds. It doubles up to `POLL_S_MAX`."""

POLL_S_MAX: Final = 0.05
"""The longest such pause, in seconds: about the recorder's own lag."""

USELESS_POLL_S_MAX: Final = 0.5
"""The longest pause of a wait whose value the index has, though only where no message can be read, in seconds."""

IDENTITY_POLL_S_MAX: Final = 0.5
"""The longest pause between two questions whether a stream is the recorded one, in seconds, while nobody can say."""
