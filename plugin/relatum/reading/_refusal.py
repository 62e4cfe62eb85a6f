"""What a broker's word at the opening of an AMQP 0.9.1 connection means: a refusal, or something that passes."""

from typing import Final

_REFUSED: Final = frozenset({403, 530})
"""Reply codes of a refused user or password, and of a virtual host that is refused or not there."""

_FULL: Final = "is reached"
"""Ends the text of a 530 that says "connection limit (10) is reached", of a user, a virtual host or a node."""


def is_refusal(code: int | None, text: str = "") -> bool:
    """Whether a Close from the broker refuses for good; False for what passes: too many connections, a node that stops.

    Args:
        code: The reply code; None where the connection ended without one. Clients guess then that access is denied,
            from how far the opening had come; a broker that stops at that moment looks the same.
        text: The reply text.
    """
    return code in _REFUSED and _FULL not in text
