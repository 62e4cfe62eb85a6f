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
    """It is of our class and of the client's, and says what the client's says."""
    error = outcome(ours, theirs, in_stream=None)
    assert isinstance(error, ours)
    assert isinstance(error, type(theirs))
    assert error.args == theirs.args
    assert str(error) == str(theirs)
    assert error.in_stream is None
    for name in ("messages", "reply_code", "reply_text", "errno", "frame"):
        if hasattr(theirs, name):
            assert getattr(error, name) == getattr(theirs, name)


@pytest.mark.parametrize(("ours", "theirs"), CASES)
def test_it_survives_pickling(ours: type[PublishError], theirs: Exception) -> None:
    """A process gets the same class, arguments and fields; the handle to settle it stays behind."""
    error = outcome(ours, theirs, in_stream=False, settle=lambda: None)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.in_stream is False
    assert not hasattr(again, "settle")


def test_the_class_is_made_once() -> None:
    """Two errors of one kind have one class, so that a cache of classes does not grow."""
    errors = [outcome(PublishNacked, pika.exceptions.NackError([])) for _ in range(2)]
    assert type(errors[0]) is type(errors[1])


def test_what_is_ours_already_stays() -> None:
    """An error that has been through here once is not wrapped again."""
    error = outcome(PublishNacked, pika.exceptions.NackError([]))
    assert outcome(PublishNacked, error, in_stream=None) is error
