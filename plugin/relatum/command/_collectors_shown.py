"""`relatum status --collector`: who collects, how far, and what waits."""

from collections.abc import Sequence
from dataclasses import asdict

from relatum.collecting import CollectorStatus, SourceStatus, collector_status
from relatum.reading import BrokerAddress
from relatum.terminal import console, moment_text, print_facts, print_json


def print_collectors(
    database: str, names: Sequence[str] | None, broker: BrokerAddress | None, *, as_json: bool
) -> None:
    """Print the status of collectors; lags only where there is a broker to ask."""
    found = collector_status(database, names, broker=broker)
    if as_json:
        print_json([asdict(each) for each in found])
        return
    if not found:
        console.print("There is no collector yet: the first member of a name makes it.")
    for each in found:
        print_facts(each.collector, _facts(each))


def _facts(status: CollectorStatus) -> list[tuple[str, str]]:
    facts = [(f"messages {state}", f"{count:,}") for state, count in status.counts.items()]
    if status.oldest_unfinished_at is not None:
        facts.append(("oldest not finished", moment_text(status.oldest_unfinished_at)))
    facts += [
        (f"without a running executor: {of_type}", f"{count:,}") for of_type, count in sorted(status.unattended.items())
    ]
    facts += [(f"stream {source.stream}", _source(source)) for source in status.sources]
    for member in status.members:
        lease = "until" if member.is_alive else "lapsed at"
        moment = moment_text(member.lease_expires_at)
        facts.append(
            (f"member {member.member}", f"{member.holder}, {', '.join(member.types) or 'no type'}, {lease} {moment}")
        )
    kept = "for ever" if status.keep_s is None else f"{status.keep_s:,} s"
    return [*facts, ("finished messages are kept", kept)]


def _source(source: SourceStatus) -> str:
    if source.position is None:
        return "not followed"
    lag = "" if source.lag_offsets is None else f", lag {source.lag_offsets:,} offsets"
    return (
        f"position {source.position:,}{lag}, followed by {source.follower or 'nobody at the moment'}, "
        f"{source.passed_over:,} passed over"
    )
