"""What becomes of the groups a member claims, as values."""

from dataclasses import dataclass
from typing import Final

from relatum.errors import GroupConflict
from relatum.membership import GroupPosition
from relatum.publishing import REASON_CHARACTERS_MAX, Burial, DeadLetters
from relatum.reading import Message
from relatum_consumer.groups.reading._group_values import Group

NEVER_ACKNOWLEDGED: Final = "never_acknowledged"
"""Why a group is given up that was given as often as its consumer allows."""


@dataclass(slots=True)
class Claim:
    """A group that is this member's."""

    group_id: str
    number: int
    """How often it has been claimed: two claims are never taken for each other."""
    given: int
    """How often it was given before, where that is counted."""
    stream_id: int
    first_offset: int
    good_until: float
    """When the lease runs out, by the monotonic clock; another may have the group then."""


@dataclass(frozen=True, slots=True)
class Given:
    """A group to be given to the caller."""

    claim: Claim
    group: Group


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A group that is not given: its messages become dead letters, where they have a place."""

    claim: Claim
    reason: str
    position: GroupPosition
    messages: tuple[Message, ...] = ()

    @property
    def headers(self) -> dict[str, str | int | bool]:
        """What dead letters say besides the reason."""
        missing = ",".join(f"{first}-{last}" for first, last in self.position.missing)
        return {"relatum_dead_group_missing": missing[:REASON_CHARACTERS_MAX]} if missing else {}

    def burial(self, letters: DeadLetters) -> Burial:
        """What makes its messages dead letters. One that cannot be one at any time is named in the log, and passed."""
        return Burial(letters, [(message, self.reason) for message in self.messages], **self.headers)


@dataclass(frozen=True, slots=True)
class Refused:
    """A group that is not sound and must not be passed over: the error is raised at its turn."""

    claim: Claim
    error: GroupConflict


Outcome = Given | GivenUp
