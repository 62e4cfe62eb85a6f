"""What must hold of contexts after a test of kills: partitions, publishers' ledgers and consumers' rows are compared.

It is told by bare pika and code of its own: nothing here is Relatum's.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.support import Delivered

Partitions = Mapping[str, Sequence[Delivered]]


class Sent(NamedTuple):
    """What a publisher noted about a message: when it began to publish it, and when it learned that it is there."""

    context: str
    began: float
    told: float | None


class Consumed(NamedTuple):
    """A row that a consumer wrote: in the order in which they became true."""

    context: str
    name: str
    stream: str
    offset: int


@dataclass(frozen=True)
class Valid:
    """A message that counts, by the partitions alone."""

    epoch: int
    offset: int
    name: str
    lies: tuple[str, int]


def sent_by(ledger: Path) -> dict[str, Sent]:
    """What a publisher wrote down, by the message's name. A last line that was cut short by its death is left out."""
    sent: dict[str, Sent] = {}
    for line in ledger.read_text().split("\n")[:-1]:
        kind, moment, name, context = line.split(" ")
        if kind == "sending":
            sent[name] = Sent(context, float(moment), None)
        else:
            sent[name] = sent[name]._replace(told=float(moment))
    return sent


def valid_messages(partitions: Partitions) -> dict[str, list[Valid]]:
    """A context's messages that no fence or marker before them outdates, in order; adoptions count for theirs."""
    found: defaultdict[str, list[Valid]] = defaultdict(list)
    at = {(stream, record.offset): record for stream, records in partitions.items() for record in records}
    for stream, records in partitions.items():
        least: defaultdict[str, int] = defaultdict(int)
        for record in records:
            kind = record.headers.get("relatum_control")
            if kind in ("fence", "marker"):
                facts = json.loads(record.body)
                for context in facts["contexts"]:
                    least[context] = max(least[context], facts["epoch"])
                continue
            if kind == "adoption":
                facts = json.loads(record.body)
                context, epoch, lies = facts["context"], facts["epoch"], (facts["stream"], facts["offset"])
            elif "serialization_context" in record.headers:
                context, lies = record.headers["serialization_context"], (stream, record.offset)
                epoch = int(record.headers["relatum_placed"].split("-")[0])
            else:
                continue
            if epoch >= least[context]:
                found[context].append(Valid(epoch, record.offset, at[lies].body.decode(), lies))
    for messages in found.values():
        messages.sort(key=lambda each: (each.epoch, each.offset))
    return found


def faults(partitions: Partitions, sent: Mapping[str, Sent], consumed: Sequence[Consumed]) -> list[str]:
    """Return everything that should not be; `sent` is by the message's name, `<publisher>/<number>`."""
    orders: defaultdict[str, list[str]] = defaultdict(list)
    for row in consumed:
        orders[row.context].append(row.name)
    valid = {context: [each.name for each in rows] for context, rows in valid_messages(partitions).items()}
    return [
        *_lost_or_doubled(partitions, sent, Counter(row.name for row in consumed)),
        *(f"{context}: consumed in another order than the partitions say"
          for context in sorted(valid.keys() | orders.keys())
          if valid.get(context, []) != orders.get(context, [])),
        *(fault for context, names in orders.items() for fault in _disorder(context, names, sent)),
    ]  # fmt: skip


def _lost_or_doubled(partitions: Partitions, sent: Mapping[str, Sent], consumed: Counter[str]) -> Iterator[str]:
    yield from (f"{name}: told and not consumed" for name, each in sent.items() if each.told and not consumed[name])
    yield from (f"{name}: consumed {times} times" for name, times in consumed.items() if times > 1)
    yield from (f"{name}: consumed and never sent" for name in consumed if name not in sent)
    lying = Counter(
        record.body.decode()
        for records in partitions.values()
        for record in records
        if "relatum_placed" in record.headers
    )
    yield from (f"{name}: {times} times in the partitions" for name, times in lying.items() if times > 1)


def _disorder(context: str, names: Sequence[str], sent: Mapping[str, Sent]) -> Iterator[str]:
    """Where a publisher's numbers do not ascend, or a message precedes one confirmed before it was begun."""
    number_of: dict[str, int] = {}
    latest, latest_name = 0.0, ""
    for name in names:
        publisher, _, number = name.rpartition("/")
        if int(number) <= number_of.get(publisher, 0):
            yield f"{context}: {name} was consumed behind {publisher}/{number_of[publisher]}"
        number_of[publisher] = int(number)
        if name not in sent:
            continue
        _, began, told = sent[name]
        if told is not None and told < latest:
            yield f"{context}: {name} was there before {latest_name} was sent, and was consumed behind it"
        if began > latest:
            latest, latest_name = began, name
