"""Measures how fast Relatum is, beside what it is built on: `python -m benchmarks --help`."""
