"""Messages that were recorded, and the events that tell of them: each made once for all who see it so."""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from relatum.keys import KeyDefinition
from relatum.reading import Message
from relatum_consumer.web._api._shown import message_row
from relatum_consumer.web._live._clients import Frame, event
from relatum_consumer.web._live._filter import Filter
from relatum_consumer.web._rendering import Rendering
from relatum_consumer.web._site import Site

Definitions = Mapping[str, KeyDefinition]


@dataclass(slots=True)
class Seen:
    """A message that was recorded, and what was made of it for some client.

    Attributes:
        number: How many messages were recorded before it since somebody looks; those that were passed over count.
        message: The message.
        super_stream: Its stream's super stream.
    """

    number: int
    message: Message
    super_stream: str | None
    _texts: dict[tuple[str, str], str] = field(default_factory=dict)
    _values: dict[str, list[str]] = field(default_factory=dict)

    def is_wanted(self, by: Filter, definitions: Definitions) -> bool:
        """Whether a filter lets it through."""
        if not by.has_stream(self.message.stream, self.super_stream):
            return False
        if by.key and by.key not in self._values:
            definition = definitions.get(by.key)
            self._values[by.key] = [] if definition is None else definition.values_of(self.message)
        return by.has_value(self._values.get(by.key, []))

    def text(self, by: Filter, site: Site, definitions: Definitions, rendering: Rendering) -> str:
        """How it is shown."""
        about = (by.form, by.key if by.value is not None and by.form == "rows" else "")
        text = self._texts.get(about)
        if text is None:
            row = message_row(site, list(definitions.values()), self.message)
            text = rendering.row(row, about[1]) if by.form == "rows" else rendering.json_text(row)
            self._texts[about] = text
        return text


class Writing:
    """Makes events of messages.

    Args:
        site: What is masked, and links.
        rendering: Makes rows.
        run_id: Stands in the events' ids: numbers of another run say nothing.
    """

    def __init__(self, site: Site, rendering: Rendering, run_id: str) -> None:
        self._site = site
        self._rendering = rendering
        self.run_id = run_id

    def frame(
        self, by: Filter, seen: Iterable[Seen], passed: int, number: int, definitions: Definitions
    ) -> Frame | None:
        """The event of some messages, and of how many there were besides; None where none concerns the filter.

        Args:
            by: The filter.
            seen: The messages.
            passed: How many more there were that nobody looked at.
            number: That of the last.
            definitions: The keys, by name.
        """
        wanted = [each for each in seen if each.is_wanted(by, definitions)]
        if not wanted and not passed:
            return None
        texts = [each.text(by, self._site, definitions, self._rendering) for each in wanted[-by.most :]]
        if by.form == "json":
            content = f'"results":[{",".join(texts)}]'
        else:
            content = f'"rows":{json.dumps("".join(reversed(texts)))}'
        data = f'{{{content},"shown":{len(texts)},"more":{len(wanted) - len(texts)},"passed":{passed}}}'
        name = f"{self.run_id}-{number}-{round(1e3 * time.time())}"
        return Frame(event("messages", data, name), len(wanted) + passed, len(texts))


def read_id(text: str) -> tuple[str, int, int]:
    """The run, the number and the milliseconds since 1970 in an event's id; of what is none those of no run."""
    run_id, _, rest = text.partition("-")
    number, _, at_ms = rest.partition("-")
    is_one = all(each.isascii() and each.isdigit() and len(each) <= 13 for each in (number, at_ms))
    return (run_id, int(number), int(at_ms)) if is_one else ("", 0, 0)
