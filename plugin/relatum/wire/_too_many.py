"""An error of its own module: one of Relatum's errors that is compiled would lose its fields."""

from relatum.errors import UndecodableMessage


class TooManyValues(UndecodableMessage):
    """A map, a list or a section has more values than are decoded."""
