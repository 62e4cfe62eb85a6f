"""Writes the ids of each line it is sent to a file, then answers with the line. Arguments: port, file."""

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
