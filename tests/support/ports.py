"""Ports that are free, chosen as private servers choose theirs: no test takes one that a server is about to take."""

from relatum.local._identity import Identity, free_port

__all__ = ["Identity", "free_port"]
