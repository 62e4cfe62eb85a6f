"""What routers of affinity sets and of contexts refuse before anything is connected to."""

from typing import Any

import pika
import pytest

import relatum
from relatum.contexts import AffinityOptions, ContextOptions, SerialOptions
from relatum.errors import ConfigurationError, InvalidInput

NOWHERE = "postgresql://nobody@127.0.0.1:1/none"


@pytest.mark.parametrize(
    ("kind", "headers"),
    [
        *((relatum.ContextRouter, {"serialization_context": name}) for name in ("", 17, "a\0b", "x" * 1025, b"bytes")),
        *((relatum.AffinityRouter, {"affinity_set": name}) for name in ("", 7, "a\0b", "\ud800", "é" * 513, b"s1")),
        (relatum.AffinityRouter, {"affinity_predecessor": 17}),
        (relatum.AffinityRouter, {"affinity_predecessor": ""}),
        (relatum.AffinityRouter, {"affinity_set": "s1", "affinity_predecessor": "m1"}),
        (relatum.AffinityRouter, {"affinity_set": "s1", "affinity_last": 1}),
        (relatum.AffinityRouter, {"affinity_set": "s1", "affinity_last": "true"}),
        (relatum.AffinityRouter, {"affinity_last": True}),
    ],
)
def test_headers_that_make_no_sense_are_refused(kind: Any, headers: dict[str, Any]) -> None:
    """What cannot be meant is one error that says nothing was sent; a name has 1 to 1,024 bytes without NUL."""
    router = kind("orders", NOWHERE)
    with pytest.raises(InvalidInput, match="nothing was sent"):
        router.publish(None, b"", pika.BasicProperties(headers=headers))
    router.close()


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (ContextOptions, {"check_s": 0.05}),
        (ContextOptions, {"contexts_max": 0}),
        (ContextOptions, {"when_database_away": "known"}),
        (AffinityOptions, {"check_s": 0.05}),
        (AffinityOptions, {"idle_s": 59.9}),
        (AffinityOptions, {"open_sets_max": 0}),
        (AffinityOptions, {"known_sets_max": 0}),
        (SerialOptions, {"batch_messages": 0}),
        (SerialOptions, {"lease_s": 0.5}),
    ],
)
def test_options_beyond_their_limits_are_refused(kind: Any, option: dict[str, Any]) -> None:
    """Each is an error that names it before anything is made; test_hostile_arguments has what no option takes."""
    refused = InvalidInput if kind is SerialOptions else ConfigurationError
    with pytest.raises(refused, match=next(iter(option)).split("_")[0]):
        kind(**option)


@pytest.mark.parametrize("router", [relatum.ContextRouter, relatum.AsyncContextRouter, relatum.AffinityRouter])
def test_wrong_arguments_are_told_when_the_router_is_made(router: Any) -> None:
    """A URL of no PostgreSQL or no broker, options of the other kind, and what cannot name a super stream."""
    other = ContextOptions() if router is relatum.AffinityRouter else AffinityOptions()
    for wrong, more in ((("sqlite://",), {}), ((NOWHERE,), {"broker": "http://host"}), ((NOWHERE, other), {})):
        with pytest.raises(ConfigurationError):
            router("orders", *wrong, **more)
    for name in ("", None, "a\nb"):
        with pytest.raises(InvalidInput):
            router(name, NOWHERE)
