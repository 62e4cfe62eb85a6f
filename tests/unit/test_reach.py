"""Whether a broker can be reached, as members that share streams judge it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from relatum.following import BrokerReach


def test_a_closed_reach_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that stores its last messages after its streams are closed still checks whether it is cut off."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("relatum.following._follower.time", clock)
    follower = SimpleNamespace(may_log_in=False, is_attached=False, is_closed=True)
    outages = SimpleNamespace(is_up=lambda _: False)
    reach = BrokerReach(cast(Any, follower), cast(Any, outages), lambda: "orders")
    for _ in range(4):
        clock.now += 5.0
        reach.look()
    assert reach.is_cut_off
