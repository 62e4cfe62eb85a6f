"""What a broker's word at the opening of an AMQP 0.9.1 connection means: a refusal, or something that passes."""

from typing import Final

from relatum.errors import AccessRefused

_REFUSED: Final = frozenset({403, 530})
"""Reply codes of a refused user or password, and of a virtual host that is refused or not there."""

_FULL: Final = "is reached"
"""Ends the text of a 530 that says "connection limit (10) is reached", of a user, a virtual host or a node."""


_NO_VHOST: Final = 530
"""NOT_ALLOWED: the reply code of a virtual host that is not there or that the user may not use."""


def login_refused(where: str, who: str, vhost: str, code: int | None = None) -> AccessRefused:
    """The error for a login that was refused, which names all that may be wrong.

    `code`: The reply code, as far as known: the broker tells a user that it does not know, or a wrong password, from a
    virtual host, but not from each other.
    """
    refuses = f"The broker at {where} refuses {who} in the virtual host {vhost!r}"
    if code == _NO_VHOST:
        return AccessRefused(f"{refuses}: there is no such virtual host, or this user may not use it.")
    return AccessRefused(f"{refuses}: the name, the password or the certificate is wrong; RabbitMQ does not say which.")


def is_refusal(code: int | None, text: str = "") -> bool:
    """Whether a Close from the broker refuses for good; False for what passes: too many connections, a node that stops.

    `code`: The reply code; None where the connection ended without one. Clients guess then that access is denied, from
    how far the opening had come; a broker that stops at that moment looks the same.
    """
    return code in _REFUSED and _FULL not in text
