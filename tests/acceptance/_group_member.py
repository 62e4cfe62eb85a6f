"""A member of a group consumer: writes `given GROUP MESSAGES`, then `done` or `lost GROUP`, each by one write."""

import logging
import os
import sys
import time

from relatum.errors import ClaimLost, Transient
from relatum_consumer import Relations
from relatum_consumer.groups import GroupConsumer

RETRY_S = 0.1


def main(broker: str, database: str, stream: str, consumer: str, file: str) -> None:
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(*words: object) -> None:
        os.write(output, (" ".join(map(str, words)) + "\n").encode())

    def work() -> None:
        with Relations(broker, database) as relations:
            options = GroupConsumer(consumer, lease_s=1, prefetch=5)
            for group in relations.groups(stream, consumer=options, follow=True):
                write("given", group.group_id, *(message.properties.message_id for message in group))
                try:
                    group.acknowledge()
                except ClaimLost:
                    write("lost", group.group_id)
                else:
                    write("done", group.group_id)

    while True:
        try:
            work()
        except Transient as error:
            logging.warning("%s: %s", type(error).__name__, error)
        time.sleep(RETRY_S)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(process)d %(levelname)s %(message)s", level=logging.WARNING)
    main(*sys.argv[1:])
