"""Affinity sets: messages that all go where the first of them went."""

from relatum.contexts.affinity._affinity_router import AffinityRouter, AsyncAffinityRouter
from relatum.contexts.affinity._sets import AffinitySet, AffinitySets

__all__ = [
    "AffinityRouter",
    "AffinitySet",
    "AffinitySets",
    "AsyncAffinityRouter",
]
