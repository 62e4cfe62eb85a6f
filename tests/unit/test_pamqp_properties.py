"""aiormq's properties as they are sent from here: byte for byte as pamqp sends them."""

import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp.commands import Basic

from relatum.publishing.clients._pamqp_properties import copy_of

texts = st.text(max_size=300) | st.sampled_from(["x" * 255, "x" * 256, "ü" * 128])
names = st.text(max_size=150)
scalars = (
    texts
    | st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats(width=32, allow_nan=False)
    | st.binary(max_size=3)
    | st.just(Decimal("1.5"))
    | st.just(datetime(2026, 1, 1, tzinfo=UTC))
)
tables = st.dictionaries(names | st.integers(), scalars | st.dictionaries(names, scalars, max_size=2), max_size=4)
properties = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            ("content_type", "content_encoding", "correlation_id", "message_id", "app_id"), texts | st.none()
        ),
        "message_type": texts | st.integers(),
        "headers": tables | st.none(),
        "delivery_mode": st.sampled_from([None, 1, 2, "2"]),
        "priority": st.integers(-1, 300) | st.none(),
        "timestamp": st.just(datetime(2026, 1, 1, tzinfo=UTC)) | st.integers(0, 9),
    },
)


def _sent(given: Basic.Properties) -> Any:
    try:
        return given.marshal()
    except (AttributeError, TypeError, ValueError, struct.error) as error:
        return type(error), str(error)


@given(given=properties)
def test_they_are_sent_as_pamqp_sends_them(given: dict[str, Any]) -> None:
    """Or refused by its own error; and they are equal."""
    theirs = Basic.Properties()
    for name, value in given.items():
        setattr(theirs, name, value)
    ours = copy_of(theirs)
    assert _sent(ours) == _sent(theirs)
    assert ours == theirs


@pytest.mark.parametrize("size", [128, 129, 255, 300])
def test_names_are_cut_where_pamqp_cuts_them(size: int) -> None:
    """At 128 bytes."""
    theirs = Basic.Properties(headers={"ü" * (size // 2) + "x" * (size % 2): "v"})
    assert copy_of(theirs).marshal() == theirs.marshal()
