"""`relatum read`: messages at offsets."""

from typing import Annotated

import typer

from relatum.ids import MessageId
from relatum.reading import Message, StreamReader
from relatum.terminal import BrokerOptions, JsonOption, message_document, print_json, print_messages, spread


@spread
def read(
    stream: Annotated[str, typer.Argument(help="The stream.", show_default=False)],
    offsets: Annotated[list[int], typer.Argument(metavar="OFFSET…", help="Where the messages lie.", min=0)],
    *,
    broker: BrokerOptions,
    as_json: JsonOption = False,
) -> None:
    """Read messages at offsets, without the database.

    An offset where nothing lies ends the command with code 6; what was read before it is printed. `--json` prints JSON
    lines, one message each.
    """
    found: list[Message] = []
    try:
        with StreamReader.open(broker.address) as reader:
            for result in reader.read_many([MessageId(stream, offset) for offset in offsets]):
                if isinstance(result, Exception):
                    raise result
                if as_json:
                    print_json(message_document(result), one_line=True)
                else:
                    found.append(result)
    finally:
        if found:
            print_messages(found)
