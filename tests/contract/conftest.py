"""Fixtures of the contract suite."""

from collections.abc import Iterator

import pytest

from tests.contract._faces import FACES, Face, open_face


@pytest.fixture(params=FACES)
def face_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def face(face_name: str, amqp_url: str) -> Iterator[Face]:
    with open_face(face_name, amqp_url) as opened:
        yield opened
