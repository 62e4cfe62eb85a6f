"""The core of lookups: statements on tables and reads of streams, the proof of an answer, and the answer itself.

`relatum_consumer.Relations`, `AsyncRelations` and lookups of groups call it.
"""
