"""Passwords: hashed by scrypt, compared in constant time, in a few threads at most."""

import base64
import hashlib
import hmac
import secrets
from typing import Final

from relatum.errors import ConfigurationError

_COST: Final = 1 << 14
_BLOCK: Final = 8
_LANES: Final = 1
"""scrypt's N, r and p: 16 MiB and about 50 ms for each try.

Source: RFC 7914, and OWASP's cheat sheet on password storage.
"""

_COST_MAX: Final = 1 << 16
_MEMORY_MAX: Final = 128 << 20


def hash_password(password: str) -> str:
    """The text to keep of a password: `scrypt$N$r$p$salt$hash`.

    Raises:
        ConfigurationError: it has fewer than eight characters.
    """
    if len(password) < 8:
        raise ConfigurationError("a password has eight characters or more")
    salt = secrets.token_bytes(16)
    digest = _digest(password, salt, _COST, _BLOCK, _LANES)
    return "$".join(["scrypt", str(_COST), str(_BLOCK), str(_LANES), _text(salt), _text(digest)])


def check_hash(hashed: str) -> None:
    """See that it is what `hash_password` gives.

    Raises:
        ConfigurationError: it is not. The message does not show it.
    """
    try:
        _parts(hashed)
    except ValueError:
        raise ConfigurationError("the password's hash is not what `relatum web --hash-password` prints") from None


def is_password(password: str, hashed: str) -> bool:
    """Whether it is the password that was hashed. It takes 50 ms of a processor."""
    cost, block, lanes, salt, digest = _parts(hashed)
    return hmac.compare_digest(_digest(password, salt, cost, block, lanes), digest)


def _parts(hashed: str) -> tuple[int, int, int, bytes, bytes]:
    kind, cost, block, lanes, salt, digest = hashed.split("$")
    numbers = int(cost), int(block), int(lanes)
    if kind != "scrypt" or not 1 < numbers[0] <= _COST_MAX or numbers[1:] != (_BLOCK, _LANES):
        raise ValueError(kind)
    return *numbers, base64.b64decode(salt, validate=True), base64.b64decode(digest, validate=True)


def _digest(password: str, salt: bytes, cost: int, block: int, lanes: int) -> bytes:
    given = password.encode("utf-8", "surrogatepass")
    return hashlib.scrypt(given, salt=salt, n=cost, r=block, p=lanes, maxmem=_MEMORY_MAX, dklen=32)


def _text(part: bytes) -> str:
    return base64.b64encode(part).decode()
