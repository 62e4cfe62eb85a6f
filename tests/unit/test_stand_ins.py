"""What is put in the place of a method."""

import copy

from relatum.publishing.clients._attributes import Late, put, put_back


class Sender:
    """Somebody's object."""

    async def send(self, body: bytes) -> bytes:
        """Send."""
        return body


def test_an_object_is_copied_with_what_stands_in() -> None:
    """A copy of the object is made as ever, and its method is there."""
    sender = Sender()
    put(sender, "send", Late(lambda: sender, "send"))
    for copied in (copy.copy(sender), copy.deepcopy(sender)):
        assert copied.send.__name__ == "send"
    put_back(sender, "send")
    assert vars(sender) == {}
