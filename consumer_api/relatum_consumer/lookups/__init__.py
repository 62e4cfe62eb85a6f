"""Lookups without a face: what is asked of tables and streams, the proof of an answer, and the answer itself.

`relatum_consumer.Relations` and `AsyncRelations` are the faces; lookups of groups are built on the same.
"""
