"""Affinity sets and serialization contexts over the partitions of a super stream: placed, moved, consumed in order."""
