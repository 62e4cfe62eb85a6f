"""Presets: keys for the messages that libraries publish, such as a message's id, its cause and its conversation.

tests/integration/test_presets.py checks what each library writes; docs/keys.md names the sources.
"""

from collections.abc import Mapping
from typing import Final

from relatum.common.checks import meant, shown
from relatum.errors import InvalidInput
from relatum.keys._definition import KeyDefinition

_TRACE: Final = KeyDefinition(
    "trace_id",
    source="trace-id:traceparent or trace-id:b3 or header:X-B3-TraceId "
    "or trace-id:cloudEvents:traceparent or trace-id:cloudEvents_traceparent "
    "or trace-id:body:application/cloudevents+json:$.traceparent",
)


def _cloud_event(attribute: str) -> str:
    """Return an attribute's source in both modes of the AMQP binding: a header with either prefix, or the JSON body."""
    return (
        f"header:cloudEvents:{attribute} or header:cloudEvents_{attribute} "
        f"or body:application/cloudevents+json:$.{attribute}"
    )


def _envelope(member: str) -> str:
    """Return the source of a member of MassTransit's envelope."""
    return f"body:application/vnd.masstransit+json:$.{member}"


PRESETS: Final[Mapping[str, tuple[KeyDefinition, ...]]] = {
    "celery": (
        KeyDefinition("celery_id", source="header:id"),
        KeyDefinition("celery_parent", source="header:parent_id", names="celery_id"),
        KeyDefinition("celery_root", source="header:root_id"),
        KeyDefinition("celery_group", source="header:group"),
        KeyDefinition("celery_result", source="body:$.task_id", names="celery_id"),
    ),
    "dramatiq": (
        KeyDefinition("dramatiq_id", source="body:$.message_id"),
        KeyDefinition("dramatiq_next", source="body:$.options.pipe_target.message_id"),
        KeyDefinition("dramatiq_group", source="body:$.options.group_completion_uuid"),
    ),
    "faststream": (
        KeyDefinition("faststream_id", source="property:message_id"),
        KeyDefinition("faststream_correlation", source="property:correlation_id"),
    ),
    "masstransit": (
        KeyDefinition("masstransit_id", source=_envelope("messageId")),
        KeyDefinition("masstransit_conversation", source=_envelope("conversationId")),
        # A consumer's messages have the consumed message's `correlationId`, or else `requestId`, as `initiatorId`.
        KeyDefinition("masstransit_correlation", source=f"{_envelope('correlationId')} or {_envelope('requestId')}"),
        KeyDefinition("masstransit_initiator", source=_envelope("initiatorId"), names="masstransit_correlation"),
        KeyDefinition("masstransit_request", source=_envelope("requestId")),
    ),
    "nservicebus": (
        KeyDefinition("nservicebus_id", source="header:NServiceBus.MessageId"),
        KeyDefinition("nservicebus_conversation", source="header:NServiceBus.ConversationId"),
        KeyDefinition("nservicebus_related", source="header:NServiceBus.RelatedTo", names="nservicebus_id"),
        KeyDefinition("nservicebus_correlation", source="header:NServiceBus.CorrelationId"),
    ),
    "cloudevents": (
        KeyDefinition("cloudevents_id", source=_cloud_event("id")),
        KeyDefinition("cloudevents_cause", source=_cloud_event("causationid"), names="cloudevents_id"),
        KeyDefinition("cloudevents_correlation", source=_cloud_event("correlationid")),
        KeyDefinition("cloudevents_subject", source=_cloud_event("subject")),
    ),
    "traceparent": (_TRACE,),
    "spring": (
        # A publish with `CorrelationData` writes its id into the header: Spring AMQP, PublisherCallbackChannel.
        KeyDefinition("spring_id", source="property:message_id or header:spring_returned_message_correlation"),
        # A listener's reply has the request's correlation id, or else the request's id: postProcessResponse.
        KeyDefinition("spring_correlation", source="property:correlation_id or property:message_id"),
        _TRACE,
    ),
}
"""The keys of each preset, by the library's name."""


def preset(name: str) -> tuple[KeyDefinition, ...]:
    """Return the keys for a library's messages, to pass to `keys=` or `add_keys`.

    Args:
        name: One of `PRESETS`.

    Raises:
        InvalidInput: the preset is unknown.
    """
    found = PRESETS.get(name) if isinstance(name, str) else None
    if found is None:
        hint = meant(name, PRESETS) if isinstance(name, str) else ""
        raise InvalidInput(f"unknown preset {shown(name)}{hint}; presets are {', '.join(PRESETS)}")
    return found
