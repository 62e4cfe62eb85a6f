"""Relationship keys: their definitions, and the comparison of their values. Pure.

`KeyDefinition` says where a key's values come from. `canonical` returns the form in which interceptor, recorder,
consumer and Spark compare values. `relatum.keys._canonical` lists which values are equal.
"""

from relatum.keys._canonical import (
    InvalidValue,
    KeyType,
    SkipReason,
    canonical,
    checked_text,
    described,
    is_integer_text,
    join_components,
    microseconds,
    moment,
    timestamp_us,
)
from relatum.keys._definition import (
    AGREE_S,
    BodyFunction,
    KeyAgreement,
    KeyDefinition,
    Source,
    as_definitions,
    bases,
    bases_of,
    masked_places,
    may_hold,
    units_of,
)
from relatum.keys._places import PROPERTIES, Component, Place
from relatum.keys._presets import PRESETS, preset

__all__ = [
    "AGREE_S",
    "PRESETS",
    "PROPERTIES",
    "BodyFunction",
    "Component",
    "InvalidValue",
    "KeyAgreement",
    "KeyDefinition",
    "KeyType",
    "Place",
    "SkipReason",
    "Source",
    "as_definitions",
    "bases",
    "bases_of",
    "canonical",
    "checked_text",
    "described",
    "is_integer_text",
    "join_components",
    "masked_places",
    "may_hold",
    "microseconds",
    "moment",
    "preset",
    "timestamp_us",
    "units_of",
]
