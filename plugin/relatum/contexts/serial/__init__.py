"""Serialization contexts over the partitions of a super stream: placed, moved, and consumed in order."""
