"""Which errors may be repeated."""

import inspect
from collections.abc import Iterator
from itertools import islice

import pytest

from relatum import errors
from relatum.waiting import BACKOFF_S, QUESTION_S, backoff, may_be_mended, may_repeat

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.RelatumError)]


def every(kind: type[BaseException]) -> Iterator[BaseException]:
    """An error of each class below one."""
    return (found("what happened") for found in ALL if issubclass(found, kind))


@pytest.mark.parametrize("final", [errors.InvalidInput, errors.DataError, errors.Conflict, errors.OffsetNotFound])
def test_what_is_wrong_with_one_message_is_never_repeated(final: type[errors.RelatumError]) -> None:
    """Bad input, bad data, conflicts and offsets that are not there are final; waiting for a person is, too."""
    for error in every(final):
        assert not may_repeat(error)
        assert not may_be_mended(error)


def test_a_defect_is_never_repeated() -> None:
    """What is no error of Relatum's is the same the next time, whatever it looks like."""
    for error in (KeyError("x"), AssertionError(), OSError("away"), TimeoutError()):
        assert not may_repeat(error)
        assert not may_be_mended(error)


def test_what_passes_may_be_repeated() -> None:
    """All that is transient may be repeated, and nothing else."""
    assert {type(error) for error in every(errors.RelatumError) if may_repeat(error)} == {
        type(error) for error in every(errors.Transient)
    }


def test_what_a_person_mends_is_not_what_passes() -> None:
    """A permission or a stream that is missing is asked for more and more rarely, not as if it came by itself."""
    for kind in (errors.AccessRefused, errors.SchemaMissing, errors.StreamNotFound, errors.PublishNacked):
        assert may_be_mended(kind("no"))
        assert not may_repeat(kind("no"))


def test_pauses_grow_to_their_longest() -> None:
    """A server that is away is tried every few seconds in the end; a refused question is asked every half minute."""
    for longest_s in (BACKOFF_S[1], QUESTION_S):
        pauses = list(islice(backoff(longest_s), 40))
        assert pauses[0] <= BACKOFF_S[0]
        assert all(longest_s / 2 <= pause <= longest_s for pause in pauses[20:])
    assert QUESTION_S / 2 >= 30
