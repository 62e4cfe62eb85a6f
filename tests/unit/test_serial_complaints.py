"""What a serial consumer logs of what goes wrong again and again."""

import pytest

from relatum.errors import BrokerUnavailable, DatabaseUnavailable
from relatum.serial.consuming._state import Complaints


def test_the_same_is_told_once_until_all_goes_well(caplog: pytest.LogCaptureFixture) -> None:
    """Each complaint is logged once, other ones in between or not; when all went well, it is news again."""
    complaints = Complaints()
    for _ in range(3):
        complaints.tell(DatabaseUnavailable("away"), "position not stored")
        complaints.tell(BrokerUnavailable("away"), "partition not read")
    assert len(caplog.records) == 2
    complaints.end()
    complaints.tell(DatabaseUnavailable("away"), "position not stored")
    assert [record.getMessage() for record in caplog.records[2:]] == ["position not stored: DatabaseUnavailable: away"]


def test_another_cause_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """What fails for another reason than before is logged, a defect with its traceback."""
    complaints = Complaints()
    complaints.tell(DatabaseUnavailable("away"), "position not stored")
    complaints.tell(ValueError("a defect"), "position not stored")
    assert [record.exc_info is None for record in caplog.records] == [True, False]
