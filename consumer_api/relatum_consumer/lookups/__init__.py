"""The core of lookups: statements on tables and reads of streams, the proof of an answer, and the answer itself.

`relatum_consumer.Relations` and `AsyncRelations` call it; so do lookups of groups.
"""
