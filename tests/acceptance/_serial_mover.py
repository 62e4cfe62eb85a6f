"""A mover of contexts, as a process of its own; ends in order on SIGTERM.

Arguments: broker, stream protocol, database, super stream, seed. It moves random contexts to random partitions, goes on
with moves that others left, and takes some of those back.
"""

import logging
import random
import signal
import sys
import threading
from collections import defaultdict
from typing import Any

from relatum.contexts import SerializationContexts
from relatum.errors import Conflict, PublishRejected, Transient

CONTEXTS_MAX = 5
ABORTED_SHARE = 0.3
"""Of the moves that another left, this share is taken back."""
PAUSE_S = 0.02


def main(broker: str, stream_url: str, database: str, super_stream: str, seed: str) -> None:
    """Work until killed or told to end."""
    logging.basicConfig(format="%(asctime)s %(process)d %(levelname)s %(message)s", level=logging.ERROR)
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    chance = random.Random(seed)
    # A server may be away when it starts, too.
    while not stop.wait(PAUSE_S):
        try:
            with SerializationContexts(super_stream, database, broker=broker, stream_url=stream_url) as contexts:
                work(contexts, chance, stop)
        except Transient as error:
            logging.info("%s: %s", type(error).__name__, error)


def work(contexts: SerializationContexts, chance: random.Random, stop: threading.Event) -> None:
    """Go on with moves and make some until told to end."""
    while not stop.wait(PAUSE_S):
        try:
            finish_one(contexts, chance)
            move_some(contexts, chance)
        except (Conflict, Transient, PublishRejected) as error:
            # Another mover was first, or a server is away; a broker that starts has no streams for a moment.
            logging.info("%s: %s", type(error).__name__, error)


def finish_one(contexts: Any, chance: random.Random) -> None:
    """Go on with a move that nobody goes on with, or take it back."""
    left = [move for move in contexts.moves() if not move.is_attended]
    if left:
        move = chance.choice(left)
        if chance.random() < ABORTED_SHARE:
            contexts.abort(move.move_id, reason="the test")
        else:
            contexts.resume(move.move_id)


def move_some(contexts: Any, chance: random.Random) -> None:
    """Move a few contexts that stand in one partition."""
    standing = defaultdict(list)
    for each in contexts.assignments():
        if each.move_id is None:
            standing[each.partition].append(each.context)
    if standing:
        source = chance.choice(sorted(standing))
        target = chance.choice([f"{source.rpartition('-')[0]}-{place}" for place in range(4)])
        if target != source:
            some = chance.sample(standing[source], min(len(standing[source]), chance.randint(1, CONTEXTS_MAX)))
            contexts.move(some, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
