"""Relationship keys: what they are and how their values compare. No input or output happens here.

`KeyDefinition` says where a key comes from; `canonical` is the one form of its values, shared by the interceptor,
the recorder, the consumer and Spark. The table of what compares equal is in `relatum.keys._canonical`.
"""

from relatum.keys._agreement import AGREE_S, KeyAgreement
from relatum.keys._canonical import (
    InvalidValue,
    KeyType,
    SkipReason,
    canonical,
    checked_text,
    join_components,
    microseconds,
    moment,
    timestamp_us,
)
from relatum.keys._definition import (
    PROPERTIES,
    BodyFunction,
    Component,
    KeyDefinition,
    Source,
    as_definitions,
)

__all__ = [
    "AGREE_S",
    "PROPERTIES",
    "BodyFunction",
    "Component",
    "InvalidValue",
    "KeyAgreement",
    "KeyDefinition",
    "KeyType",
    "SkipReason",
    "Source",
    "as_definitions",
    "canonical",
    "checked_text",
    "join_components",
    "microseconds",
    "moment",
    "timestamp_us",
]
