"""Affinity sets: messages that all go where the first of them went."""

from relatum.affinity._router import AffinityRouter, AsyncAffinityRouter
from relatum.affinity._sets import AffinitySet, AffinitySets

__all__ = [
    "AffinityRouter",
    "AffinitySet",
    "AffinitySets",
    "AsyncAffinityRouter",
]
