"""Wrong arguments of groups: one clear error that names the argument, and says no more than what happened."""

from typing import Any

import pytest

import relatum
from relatum.errors import ConfigurationError, InvalidGroup
from relatum.membership import checked_group_id, checked_membership, checked_sequence


@pytest.mark.parametrize("wrong", [None, "orders", 5])
def test_a_group_is_published_through_an_intercepted_channel(wrong: Any) -> None:
    """What is no channel is refused before the group has an id."""
    with pytest.raises(ConfigurationError, match=f"^channel is .*{type(wrong).__name__}"):
        relatum.MessageGroup(wrong, "", "orders")
    with pytest.raises(ConfigurationError, match=f"^target is .*{type(wrong).__name__}"):
        relatum.AsyncMessageGroup(wrong, "orders")
    with pytest.raises(ConfigurationError, match=r"^channel is"):
        relatum.publish(wrong, "", "orders", b"body")


def test_only_what_was_to_be_sent_was_not_sent() -> None:
    """A reader that gives a wrong id or number sends nothing anyway; a publisher wants to know."""
    for check, wrong in ((checked_group_id, "x"), (checked_sequence, 0), (checked_sequence, "1")):
        with pytest.raises(InvalidGroup) as caught:
            check(wrong)
        assert "sent" not in str(caught.value)
    group_id = relatum.new_group_id()
    for headers in ({"group_id": "x"}, {"group_id": group_id, "group_sequence": 0}, {"group_sequence": 1}):
        with pytest.raises(InvalidGroup, match="nothing was sent"):
            checked_membership(headers)
