"""Benchmarks of Relatum against the libraries and servers it is built on: `python -m benchmarks --help`."""
