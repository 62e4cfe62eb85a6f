"""What routers of affinity sets and of contexts refuse before anything is connected to."""

from typing import Any

import pika
import pytest

import relatum
from relatum.errors import InvalidInput

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
