"""Which errors may be repeated."""

import inspect
from itertools import islice

import pytest

from relatum import errors
from relatum.waiting import BACKOFF_S, QUESTION_S, backoff, may_be_mended, may_repeat

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.RelatumError)]
FINAL = (errors.InvalidInput, errors.DataError, errors.Conflict, errors.OffsetNotFound)
MENDED = (errors.AccessRefused, errors.SchemaMissing, errors.StreamNotFound, errors.PublishNacked)


@pytest.mark.parametrize("kind", [*ALL, KeyError, AssertionError, OSError, TimeoutError])
def test_what_may_be_repeated(kind: type[Exception]) -> None:
    """All that is transient, and nothing else; what is wrong with one message, and a defect, nobody mends either."""
    error = kind("what happened")
    assert may_repeat(error) == issubclass(kind, errors.Transient)
    if issubclass(kind, FINAL) or kind not in ALL:
        assert not may_be_mended(error)
    if kind in MENDED:
        # A permission or a stream that is missing is asked for more and more rarely, not as if it came by itself.
        assert may_be_mended(error)


def test_pauses_grow_to_their_longest() -> None:
    """A server that is away is tried every few seconds in the end; a refused question is asked every half minute."""
    for longest_s in (BACKOFF_S[1], QUESTION_S):
        pauses = list(islice(backoff(longest_s), 40))
        assert pauses[0] <= BACKOFF_S[0]
        assert all(longest_s / 2 <= pause <= longest_s for pause in pauses[20:])
    assert QUESTION_S / 2 >= 30
