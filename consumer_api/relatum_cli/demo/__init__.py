"""`relatum demo`: flights, planes and weather of New York, 2013, published, recorded, found, and checked."""

from relatum_cli.demo._command import demo

__all__ = ["demo"]
