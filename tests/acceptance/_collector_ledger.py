"""The process a collector's executor talks to: writes down the ids of a line, then says so.

Arguments: port, file. Each line is answered with itself after its ids are in the file, one on a line, by one write.
"""

import os
import socketserver
import sys


class Server(socketserver.ThreadingTCPServer):
    """One that may be started again on its port at once."""

    allow_reuse_address = True
    daemon_threads = True


class Ledger(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            os.write(FILE, b"".join(name + b"\n" for name in line.split()))
            self.wfile.write(line)


if __name__ == "__main__":
    FILE = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Server(("127.0.0.1", int(sys.argv[1])), Ledger) as server:
        server.serve_forever()
