"""Errors that are ours and the client's at once."""

import pickle

import pika
import pytest
from aiormq.exceptions import AMQPConnectionError, DeliveryError
from pamqp.commands import Basic

from relatum.errors import PublishError, PublishNacked, PublishOutcomeUnknown, PublishUnroutable
from relatum.publishing._publish_errors import outcome

CASES = [
    (PublishUnroutable, pika.exceptions.UnroutableError([])),
    (PublishNacked, pika.exceptions.NackError([])),
    (PublishOutcomeUnknown, pika.exceptions.ConnectionClosedByBroker(320, "CONNECTION_FORCED")),
    (PublishOutcomeUnknown, pika.exceptions.StreamLostError("lost", ConnectionResetError(104, "reset"))),
    (PublishNacked, DeliveryError(None, Basic.Nack(1))),
    (PublishOutcomeUnknown, AMQPConnectionError("gone")),
    (PublishOutcomeUnknown, TimeoutError()),
    (PublishOutcomeUnknown, ConnectionResetError(104, "reset")),
]


@pytest.mark.parametrize(("ours", "theirs"), CASES)
def test_both_kinds_of_caller_catch_it(ours: type[PublishError], theirs: Exception) -> None:
    """It is of our class and of the client's, and says what the client's says; in another process, too.

    The handle to settle it stays behind.
    """
    error = outcome(ours, theirs, in_stream=False, settle=lambda: None)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert not hasattr(again, "settle")
    for each in (error, again):
        assert isinstance(each, ours)
        assert isinstance(each, type(theirs))
        assert (str(each), each.in_stream) == (str(theirs), False)
    assert error.args == theirs.args
    for name in ("messages", "reply_code", "reply_text", "errno", "frame"):
        if hasattr(theirs, name):
            assert getattr(error, name) == getattr(theirs, name)


def test_the_class_is_made_once() -> None:
    """Two errors of one kind have one class, so that a cache of classes does not grow."""
    errors = [outcome(PublishNacked, pika.exceptions.NackError([])) for _ in range(2)]
    assert type(errors[0]) is type(errors[1])


def test_what_is_ours_already_stays() -> None:
    """An error that has been through here once is not wrapped again."""
    error = outcome(PublishNacked, pika.exceptions.NackError([]))
    assert outcome(PublishNacked, error, in_stream=None) is error
