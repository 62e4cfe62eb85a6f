"""A member of a consumer that shares groups: writes down what it is given and what it acknowledged.

Arguments: broker, database, stream, consumer, file. Each line goes to the file with one write, so that a kill leaves
whole lines: `given GROUP COUNT` before the acknowledgement, `done GROUP` after it, `lost GROUP` where it was refused.
"""

import os
import sys

from relatum.errors import ClaimLost
from relatum_consumer import Relations
from relatum_consumer.groups import GroupConsumer


def main(broker: str, database: str, stream: str, consumer: str, file: str) -> None:
    """Work until killed."""
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(*words: object) -> None:
        os.write(output, (" ".join(map(str, words)) + "\n").encode())

    with Relations(broker, database) as relations:
        options = GroupConsumer(consumer, lease_s=1, prefetch=5)
        for group in relations.groups(stream, consumer=options, follow=True):
            write("given", group.group_id, len(group))
            try:
                group.acknowledge()
            except ClaimLost:
                write("lost", group.group_id)
            else:
                write("done", group.group_id)


if __name__ == "__main__":
    main(*sys.argv[1:])
