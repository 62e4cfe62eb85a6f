"""What routers of affinity sets and of contexts refuse before anything is connected to."""

from typing import Any

import pika
import pytest

import relatum
from relatum.contexts import AffinityOptions, ContextOptions
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


@pytest.mark.parametrize("kind", [ContextOptions, AffinityOptions])
@pytest.mark.parametrize(
    "option",
    [
        {"check_s": 0.05},
        {"check_s": -1},
        {"timeout_s": -1},
        {"timeout_s": float("nan")},
        {"header": ""},
        {"balance": "fairest"},
        {"when_database_away": "sleep"},
    ],
)
def test_options_that_cannot_be_are_refused(kind: Any, option: dict[str, Any]) -> None:
    """Each wrong option is an error before a router is made."""
    with pytest.raises(ConfigurationError):
        kind(**option)


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (ContextOptions, {"contexts_max": 0}),
        (ContextOptions, {"when_database_away": "known"}),
        (AffinityOptions, {"idle_s": 59.9}),
        (AffinityOptions, {"open_sets_max": 0}),
        (AffinityOptions, {"known_sets_max": 0}),
        (AffinityOptions, {"predecessors_max": -1}),
    ],
)
def test_options_of_one_kind_are_checked_as_well(kind: Any, option: dict[str, Any]) -> None:
    """What contexts, or affinity sets, alone have."""
    with pytest.raises(ConfigurationError):
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
