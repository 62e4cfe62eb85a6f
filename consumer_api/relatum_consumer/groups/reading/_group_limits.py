"""Every limit of reading groups, by name, with its unit and where it comes from."""

from typing import Final

WINDOW_OFFSETS: Final = 131_072
"""Offsets of a stream whose rows are asked for at once; each row takes about 200 bytes while it is held."""

BATCH_MESSAGES: Final = 131_072
"""Messages of the groups that are read in one pass. Groups that lie mixed over so many messages are read as fast as
those that lie one behind the other; `read_many` holds 64 MiB of them at most, and 1 GiB more in a file; a group at the
end of a batch may go beyond it."""

FIRST_GROUPS: Final = 64
"""Groups whose rows are asked for at first, while nothing is known of how large groups are."""

GROUPS_AT_ONCE: Final = 2_048
"""Groups whose rows are asked for at once: what follows many small groups may be large ones."""

UNRECORDED_MEMBERS_MAX: Final = 500_000
"""Messages of groups that are not recorded yet and are held by their places, 200 bytes each: a recorder is to blame,
or a back-fill is due, where there are more."""

READ_RETRIES: Final = 1
"""How often a batch is gone on with on a new connection: the broker closes one while its groups are being handled."""
