"""What docs/groups.md shows of getting groups is run, as it stands there."""

import re
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from relatum.membership import GROUP_KEY
from relatum_consumer import Relations
from tests.support import publish_plain, record
from tests.support.groups import group_id, of_group, whole_group

PAGE = (Path(__file__).parents[2] / "docs" / "groups.md").read_text()


def test_what_the_page_shows_of_getting_works(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole group and one that lacks a message: each block says so in its own way."""
    publish_plain(amqp_url, stream_name, [*whole_group(1, 2), of_group(2, 1, time_us=1), of_group(2, 3, last=True)])
    record(amqp_url, engine, stream_name, keys=[GROUP_KEY])
    begin = PAGE.index("\n## Getting")
    blocks = re.findall(r"```python\n(.*?)```", PAGE[begin : PAGE.index("\n## ", begin + 1)], re.DOTALL)
    outputs = []
    with Relations(amqp_url, database_url) as relations:
        names = {
            "relations": relations,
            "group_id": group_id(2),
            "timedelta": timedelta,
        }
        for block in blocks:
            shown = block.replace('"orders"', repr(stream_name))
            exec(compile(shown, "docs/groups.md", "exec"), names)
            outputs.append(capsys.readouterr().out)
    whole, _, incomplete = outputs
    assert whole == f"{group_id(1)} 2 [b'1-1', b'1-2']\n"
    assert incomplete.startswith(f"{group_id(2)} ((2, 2),) 1970-01-01 00:00:00.000001+00:00")
