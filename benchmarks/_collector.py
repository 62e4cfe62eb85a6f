"""A collector that is filled up to its limit, in a process of its own, to be weighed from outside.

Arguments: broker, stream protocol, database, collector's name, bytes_max, streams. It prints a line when it holds all
it may (at once, where it follows no stream), and ends with its input.
"""

import sys
import threading
from typing import Final

from relatum import Broker, MessageCollector
from relatum.collecting import Bulk, ExecutorOptions

LOOK_S: Final = 0.05

QUEUE_BULKS: Final = 1_000_000
"""So many that only the bytes are a limit."""


def main(broker_url: str, stream_url: str, database_url: str, name: str, bytes_max: str, *streams: str) -> None:
    """Fill up, say so, and wait for the end of the input."""
    is_over = threading.Event()

    def hold(bulk: Bulk) -> None:
        is_over.wait()

    broker = Broker(broker_url, stream_url=stream_url)
    collector = MessageCollector(name, database=database_url, broker=broker, streams=streams, bytes_max=int(bytes_max))
    collector.register_executor("order", hold, ExecutorOptions(queue_bulks=QUEUE_BULKS))
    collector.start()
    while streams and collector.statistics().held_bytes < int(bytes_max):
        is_over.wait(LOOK_S)
    print("full", flush=True)
    sys.stdin.read()
    is_over.set()


if __name__ == "__main__":
    main(*sys.argv[1:])
