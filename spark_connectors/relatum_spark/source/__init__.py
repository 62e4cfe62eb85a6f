"""Streams as a source of Spark: batches and micro-batches."""
