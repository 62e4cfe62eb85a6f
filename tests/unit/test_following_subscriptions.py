"""The subscriptions of one connection."""

import pytest

from relatum.following._followed import Followed
from relatum.following._follower import WINDOW_BYTES
from relatum.following._subscriptions import CROWD, Subscriptions
from relatum.wire import Login, StreamSession


@pytest.mark.parametrize(
    ("version", "waits"), [("3.10.8", True), ("4.2.0", True), ("4.2.1", False), ("4.3.6", False), ("", False)]
)
def test_a_connection_is_crowded_where_the_broker_waits_for_each_stream(version: str, waits: bool) -> None:
    """From so many streams on, not before, and not where none waits for another; it takes more nevertheless."""
    session = StreamSession(Login("user", "password"))
    session.server_properties = {"version": version}
    subscriptions = Subscriptions(session)
    all_followed = [Followed(f"s{number}", number, 0, None, WINDOW_BYTES) for number in range(CROWD)]
    for followed in all_followed:
        assert not subscriptions.is_crowded
        subscriptions.add(followed, 0)
    assert subscriptions.is_crowded is waits
    assert subscriptions.room > 0
    subscriptions.remove(all_followed[0])
    assert not subscriptions.is_crowded
