"""Joins of messages over their relations: relations first, payloads for what is left."""
