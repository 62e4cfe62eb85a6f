"""What spans there are, and what they may tell."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from relatum.checks import checked_names, shown
from relatum.errors import InvalidInput


class Part(StrEnum):
    """What spans can be left out of."""

    LOOKUPS = "lookups"
    """Calls of `Relations` and `AsyncRelations`."""
    RECORDER = "recorder"
    """Transactions of recorders."""
    COLLECTOR = "collector"
    """Bulks of collectors."""
    SERIAL = "serial"
    """Batches of serial consumers."""
    MOVES = "moves"
    """Moves of serialization contexts."""


_DISABLED: Final = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"
"""OpenTelemetry's variable for what `opentelemetry-instrument` leaves alone: names with commas, or `*`."""


@dataclass(frozen=True, slots=True)
class _Options:
    parts: frozenset[Part]
    values_of: frozenset[str] = frozenset()
    ids: bool = False


def _beginning() -> _Options:
    disabled = {name.strip() for name in os.environ.get(_DISABLED, "").split(",")}
    return _Options(frozenset() if disabled & {"relatum", "*"} else frozenset(Part))


_options = _beginning()


def configure(*, without: Iterable[str] = (), values_of: Iterable[str] = (), ids: bool = False) -> None:
    """Say what spans there are in this process, and what they may tell; each call says all of it.

    Args:
        without: Parts that have no spans, of "lookups", "recorder", "collector", "serial" and "moves". Default: none.
        values_of: Keys of which look-ups tell the value that is sought, as `relatum.key.NAME`. Values that are masked
            are not told, whatever is said here. Default: none.
        ids: Whether links to messages tell `messaging.message.id` and `messaging.message.conversation_id`, of the
            properties `message_id` and `correlation_id`. Default: False, for keys are often made of them.

    Raises:
        InvalidInput: there is no such part.
    """
    global _options
    names = checked_names("without", without)
    wrong = [name for name in names if name not in [*Part]]
    if wrong:
        raise InvalidInput(f"without= takes of {', '.join(Part)}, not {shown(wrong[0])}")
    keys = checked_names("values_of", values_of)
    _options = _Options(frozenset(Part) - {Part(name) for name in names}, frozenset(keys), ids)


def has_spans(part: Part) -> bool:
    """Whether there are to be spans of this."""
    return part in _options.parts


def shows_ids() -> bool:
    """Whether the properties `message_id` and `correlation_id` may be told."""
    return _options.ids


def shows_values_of(key: str) -> bool:
    """Whether values of a key may be told, as far as they are not masked."""
    return key in _options.values_of
