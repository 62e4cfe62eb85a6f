"""Streams as a sink of Spark: nothing is published twice, however often a task runs."""
