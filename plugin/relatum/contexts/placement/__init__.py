"""Placements: which partition of a super stream a named set of messages goes to, and who may rely on it how long."""
