"""Placements: which partition of a super stream a named set of messages goes to, and who may rely on it how long."""

from relatum.contexts.placement._placement_prune import forget_placements
from relatum.contexts.placement._router_statistics import RouterStatistics

__all__ = ["RouterStatistics", "forget_placements"]
