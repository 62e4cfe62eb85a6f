"""Affinity sets: messages that all go where the first of them went."""
