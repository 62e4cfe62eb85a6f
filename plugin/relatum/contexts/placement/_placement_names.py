"""What may name a context or an affinity set. Pure."""

from typing import Any

from relatum.errors import InvalidInput
from relatum.keys import InvalidValue, checked_text


def check_name(name: Any, what: str = "the name of a context or set", *, outcome: str = "nothing was changed") -> str:
    """The name itself.

    Args:
        name: The name.
        what: What is named by it, for the error.
        outcome: What is true of the call that is refused, for the error.

    Raises:
        InvalidInput: it is no text, empty, over 1,024 bytes in UTF-8, or nothing that PostgreSQL stores.
    """
    if not isinstance(name, str):
        raise InvalidInput(f"{what} is text, not {type(name).__name__}; {outcome}")
    if not name:
        raise InvalidInput(f"{what} is not empty; {outcome}")
    try:
        return checked_text(name)
    except InvalidValue as error:
        raise InvalidInput(f"{what} cannot be {name[:40]!r}: {error.reason}; {outcome}") from error
