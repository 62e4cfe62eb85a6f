"""The core of lookups: SQL statements, reads of streams, the proof of an answer, and the answer itself.

`relatum_consumer.Relations`, `AsyncRelations` and the group lookups call it.
"""
