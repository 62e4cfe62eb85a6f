"""The keys that are defined, and how much of the table each takes."""

from dataclasses import dataclass
from datetime import datetime

from relatum_consumer.web._api._shown import hue_of
from relatum_consumer.web._endpoint import Endpoint
from relatum_consumer.web._site import Site


@dataclass(frozen=True, slots=True)
class KeysAsked:
    """Nothing is asked."""


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key: where it comes from, and its rows of all streams; estimated from a sample unless `is_exact`.

    Where it `names` another key, a message that has it came from the one that has the same value of that key.
    """

    name: str
    sources: tuple[str, ...]
    type: str
    names: str | None
    since: datetime | None
    is_masked: bool
    hue: int
    rows: int
    bytes: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class KeysAnswer:
    """The keys, by name."""

    keys: tuple[KeyRow, ...]


async def key_rows(site: Site) -> tuple[KeyRow, ...]:
    """The keys with their sizes."""
    masked = {each.name for each in await site.keys() if site.masking.is_masked(each)}
    return tuple(
        KeyRow(
            name=each.definition.name,
            sources=tuple(each.definition.sources),
            type=each.definition.value_type.value,
            names=each.definition.names,
            since=each.definition.since,
            is_masked=each.definition.name in masked,
            hue=hue_of(each.definition),
            rows=each.rows,
            bytes=each.bytes,
            is_exact=each.is_exact,
        )
        for each in await site.sizes()
    )


async def keys(site: Site, _: KeysAsked) -> KeysAnswer:
    """Answer with all of them."""
    return KeysAnswer(await key_rows(site))


KEYS = Endpoint("/keys", "The keys that are defined, with their sizes.", KeysAsked, KeysAnswer, keys)
