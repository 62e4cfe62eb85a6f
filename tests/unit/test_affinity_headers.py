"""What headers may not say of an affinity set: told before anything is connected to."""

from typing import Any

import pika
import pytest

import relatum
from relatum.errors import InvalidInput


@pytest.mark.parametrize(
    "headers",
    [
        {"affinity_set": 7},
        {"affinity_set": ""},
        {"affinity_set": "a\0b"},
        {"affinity_set": "\ud800"},
        {"affinity_set": "é" * 513},
        {"affinity_set": b"s1"},
        {"affinity_predecessor": 17},
        {"affinity_predecessor": ""},
        {"affinity_set": "s1", "affinity_predecessor": "m1"},
        {"affinity_set": "s1", "affinity_last": 1},
        {"affinity_set": "s1", "affinity_last": "true"},
        {"affinity_last": True},
    ],
)
def test_headers_that_make_no_sense_are_refused(headers: dict[str, Any]) -> None:
    """What cannot be meant is one error that says nothing was sent."""
    router = relatum.AffinityRouter("orders", "postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(InvalidInput, match="nothing was sent"):
        router.publish(None, b"", pika.BasicProperties(headers=headers))
    router.close()
