"""`relatum demo`: publishes, records, finds and checks flights, planes and weather of New York in 2013."""

from relatum_cli.demo._command import demo

__all__ = ["demo"]
