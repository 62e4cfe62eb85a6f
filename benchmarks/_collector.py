"""A process with a collector that fills up to its limit, so that its memory can be measured from outside.

Arguments: broker, stream protocol, database, collector's name, bytes_max, streams. It prints a line when the collector
is full (at once, if it follows no stream), and ends at the end of its input.
"""

import sys
import threading
from typing import Final

from relatum import Broker, MessageCollector
from relatum.collecting import Bulk, ExecutorOptions

LOOK_S: Final = 0.05

QUEUE_BULKS: Final = 1_000_000
"""Large enough that only the bytes limit the collector."""


def main(broker_url: str, stream_url: str, database_url: str, name: str, bytes_max: str, *streams: str) -> None:
    """Fill the collector, print a line, and wait for the end of the input."""
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
