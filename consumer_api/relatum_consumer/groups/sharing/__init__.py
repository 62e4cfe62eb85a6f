"""Consumers that share groups: each group is given to one of their members."""
