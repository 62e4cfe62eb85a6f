"""The root of all errors. See `relatum.errors`."""

from typing import Any


class RelatumError(Exception):
    """The root of all errors of Relatum.

    Args:
        message: What failed, with which value, and what to do next.
        fields: Facts a program can branch on; each becomes an attribute.
    """

    def __init__(self, message: str = "", /, **fields: Any) -> None:
        super().__init__(message)
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the message, then from the fields: keyword arguments survive pickling."""
        return (type(self), self.args, self.__dict__)
