"""One module for each part of the page: what is asked, what is answered, and the function between, also for `/api`."""

from typing import Final

from relatum_consumer.web import (  # noqa: F401
    collectors,
    contexts,
    groups,
    health,
    live,
    message,
    missing,
    search,
    streams,
    trace,
)
from relatum_consumer.web.endpoint import ENDPOINTS as _DECLARED

ENDPOINTS: Final = tuple(_DECLARED)
