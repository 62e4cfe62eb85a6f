"""Names for those who hold leases."""

import os
import secrets
import socket


def new_holder() -> str:
    """A name for this process that says where it runs: host, process id, and something nobody else has."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(6)}"
