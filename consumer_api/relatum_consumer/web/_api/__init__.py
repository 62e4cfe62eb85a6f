"""One module for each part of the page: what is asked, what is answered, and the function between, also for `/api`."""

from typing import Final

from relatum_consumer.web._api import (  # noqa: F401
    _collectors,
    _contexts,
    _groups,
    _health,
    _live,
    _message,
    _missing,
    _search,
    _streams,
    _trace,
)
from relatum_consumer.web._endpoint import ENDPOINTS as _DECLARED

ENDPOINTS: Final = tuple(_DECLARED)
