"""What a message's headers say of its affinity set, and what they may say. Pure."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from relatum.contexts.placement._model import check_name
from relatum.errors import InvalidInput
from relatum.headers import AFFINITY_LAST_HEADER, PREDECESSOR_HEADER


class Wish(NamedTuple):
    """Where a message asks to go.

    Attributes:
        name: The affinity set it names; None for none.
        is_last: Whether its set ends with it.
        predecessor: The message whose set it joins: a `message_id`, or "stream:offset"; None for none.
    """

    name: str | None = None
    is_last: bool = False
    predecessor: str | None = None


NO_WISH: Final = Wish()
"""What a message of no set asks for: any partition will do."""


def wish_of(headers: Mapping[str, Any] | None, header: str) -> Wish:
    """What the headers ask for.

    Raises:
        InvalidInput: The name or the predecessor is not text of 1 to 1,024 bytes of UTF-8 without NUL, both are given,
            the flag is no boolean, or it is True on a message that is in no set.
    """
    if not headers:
        return NO_WISH
    name, predecessor = headers.get(header), headers.get(PREDECESSOR_HEADER)
    is_last = headers.get(AFFINITY_LAST_HEADER, False)
    if name is not None:
        if predecessor is not None:
            raise InvalidInput(
                f"a message names its affinity set ({header}) or a predecessor ({PREDECESSOR_HEADER}), not both; "
                "nothing was sent"
            )
        check_name(name, f"the header {header}", outcome="nothing was sent")
    elif predecessor is not None:
        check_name(predecessor, f"the header {PREDECESSOR_HEADER}", outcome="nothing was sent")
    # A header that is there without a value says nothing.
    if is_last is None:
        is_last = False
    if type(is_last) is not bool:
        raise InvalidInput(
            f"the header {AFFINITY_LAST_HEADER} is True or False, not {type(is_last).__name__}; nothing was sent"
        )
    if is_last and name is None and predecessor is None:
        raise InvalidInput(
            f"the header {AFFINITY_LAST_HEADER} ends an affinity set, and this message is in none; nothing was sent"
        )
    return Wish(name, is_last, predecessor)
