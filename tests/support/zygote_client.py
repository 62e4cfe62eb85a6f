"""Begin a program by a zygote, and end as it does: zygote_client.py ADDRESS ARGUMENTS…; standard library alone."""

import json
import os
import signal
import socket
import sys
from contextlib import suppress


def main(address: str, *arguments: str) -> int:
    ended, child_ended = os.pipe()
    told = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}  # noqa: PTH109 (quick)
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asking.connect(address)
    socket.send_fds(asking, [json.dumps(told).encode()], [child_ended, 1, 2, 0])
    pid = int(asking.recv(64))

    def end(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    signal.signal(signal.SIGTERM, end)
    # Readers and writers must see the program's end, not that of this process.
    for each in (0, 1, 2, child_ended):
        os.close(each)
    with os.fdopen(ended) as waiting:
        code = int(waiting.read() or 1)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
