"""What a connection of the stream protocol was asked for, and what came."""

from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """Counts of one connection, or of what one caller had over several.

    Attributes:
        attaches: Subscriptions.
        chunks: Chunks that came; those beyond one for each attach were read on.
        records: Records in them.
        bytes: Their bytes, as they came.
    """

    attaches: int = 0
    chunks: int = 0
    records: int = 0
    bytes: int = 0

    def add(self, other: "Traffic") -> None:
        """Count another's, too."""
        self.attaches += other.attaches
        self.chunks += other.chunks
        self.records += other.records
        self.bytes += other.bytes
