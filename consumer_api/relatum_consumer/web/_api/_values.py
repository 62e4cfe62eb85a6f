"""Values of a key that begin as what is typed."""

from dataclasses import dataclass
from typing import Annotated, Final

from relatum.errors import InvalidInput
from relatum_consumer.web._endpoint import Endpoint
from relatum_consumer.web._parameters import Parameter
from relatum_consumer.web._site import Site

_OFFERED: Final = 10


@dataclass(frozen=True, slots=True)
class ValuesAsked:
    """What was typed of a key's value."""

    key: Annotated[str, Parameter("The key's name.")] = ""
    prefix: Annotated[str, Parameter("What its values begin with, as they are stored; all where left out.")] = ""
    limit: Annotated[int, Parameter("Values at most.", least=1, most=100)] = _OFFERED


@dataclass(frozen=True, slots=True)
class ValuesAnswer:
    """The first values, in order. `reason` says why there are none where that is not for want of any."""

    values: tuple[str, ...]
    reason: str


async def values(site: Site, asked: ValuesAsked) -> ValuesAnswer:
    """List them, unless they are masked, or of several parts."""
    if not asked.key:
        raise InvalidInput("key is missing: the name of the key")
    definition = next((each for each in await site.keys() if each.name == asked.key), None)
    if definition is not None and site.masking.is_masked(definition):
        return ValuesAnswer((), "values of a masked key are not listed")
    if definition is not None and definition.is_composite:
        return ValuesAnswer((), "values of several parts are not listed")
    return ValuesAnswer(await site.relations.values(asked.key, asked.prefix, limit=asked.limit), "")


VALUES = Endpoint("/values", "Values of a key that begin with a prefix.", ValuesAsked, ValuesAnswer, values)
