"""Whether both servers answer."""

from dataclasses import dataclass

from relatum_consumer.web.endpoint import endpoint
from relatum_consumer.web.parameters import Nothing
from relatum_consumer.web.problems import Problem, Refused
from relatum_consumer.web.site import Site


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """Both servers answer; where one does not, there is an error with status 503 instead."""

    is_well: bool


@endpoint("/health", "Whether the database and the broker answer.")
async def health(site: Site, _: Nothing) -> HealthAnswer:
    """Ask both."""
    away = await site.away(now=True)
    if away:
        wrong = "; ".join(f"{each.name} does not answer: {each.error}" for each in away)
        raise Refused(Problem(503, "not_well", wrong, "It may pass: ask again.", {"Retry-After": "1"}))
    return HealthAnswer(is_well=True)
