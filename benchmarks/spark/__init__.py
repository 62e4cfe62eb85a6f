"""Benchmarks of Relatum's Spark connector against the obvious alternatives."""
