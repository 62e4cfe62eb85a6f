"""Relationship keys: what they are and how their values compare. No input or output happens here.

`KeyDefinition` says where a key comes from; `canonical` is the one form of its values, shared by the interceptor,
the recorder, the consumer and Spark. The table of what compares equal is in `relatum.keys._canonical`.
"""

from relatum.keys._canonical import (
    InvalidValue,
    KeyType,
    SkipReason,
    canonical,
    checked_text,
    described,
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
    units_of,
)
from relatum.keys._places import PLACES_MAX, PROPERTIES, Component, Content, Place, path_text
from relatum.keys._presets import PRESETS, preset

__all__ = [
    "AGREE_S",
    "PLACES_MAX",
    "PRESETS",
    "PROPERTIES",
    "BodyFunction",
    "Component",
    "Content",
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
    "join_components",
    "masked_places",
    "microseconds",
    "moment",
    "path_text",
    "preset",
    "timestamp_us",
    "units_of",
]
