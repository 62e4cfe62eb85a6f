"""What is uncovered and still in the stream is always somebody's work."""

from typing import Any

import cramjam
import pytest

from relatum.reading import StreamReader
from relatum.recording.backfilling import plan_backfill
from relatum.wire.chunk import _CODEC_NAMES
from tests.integration.test_foreign import headed, in_batch, text
from tests.support import wait_until
from tests.support._raw_publisher import RawPublisher
from tests.support.place import Place


def orders(count: int, start: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    return [(b"%d" % n, {"order_id": f"o{n}"}) for n in range(start, start + count)]


def test_a_gap_that_an_interrupted_back_fill_left_is_shown_and_closed(place: Place) -> None:
    """A gap that a killed back-fill left shows up as lag, and the next recorder closes it."""
    place.put_recorded(*orders(60), keys=["order_id"])
    place.put(*orders(100, start=60))
    with StreamReader.open(place.amqp) as reader:
        plan_backfill(place.engine, reader, "/", place.stream, None)
    assert (place.status().gaps, place.status().lag_offsets) == ([(60, 160)], 100)
    assert (place.status().lag_s or 0) > 0
    with place.recording():
        place.put(*orders(5, start=160))
        wait_until(lambda: not place.status().lag_offsets, what="no gap")
    assert place.values() == [f"o{n}" for n in range(165)]


def test_a_batch_that_cannot_be_unpacked_is_not_covered_until_it_can(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch whose codec is not known is a gap that stops no recorder, which closes it once it is."""
    _, count, size, content = in_batch(["b", "c"])
    batch = (4, count, size, bytes(cramjam.zstd.compress(content)))
    with RawPublisher(place.stream_url, place.stream) as publisher:
        publisher.publish(headed(text("a")), batch, headed(text("d")))
    monkeypatch.delitem(_CODEC_NAMES, 4)
    with place.recording(keys=["order_id"]):
        place.wait_recorded()
        assert place.values() == ["a", "d"]
        found = place.status()
        assert (found.gaps, found.covered["order_id"], found.lag_offsets) == ([(1, 3)], [(0, 1), (3, 4)], 2)
        (event,) = found.events
        assert (event.kind, event.from_offset, event.to_offset) == ("unreadable", 1, 3)
        assert "compression 4" in event.detail
        place.backfill()
        assert place.status().gaps == [(1, 3)]
        monkeypatch.undo()
        wait_until(lambda: not place.status().gaps, what="the gap closed")
    assert place.values() == ["a", "b", "c", "d"]


def test_a_gap_that_cannot_be_closed_keeps_nobody_from_another_streams(place: Place, other_stream: str) -> None:
    """A stream's gap is closed though PostgreSQL refuses another stream's gap again and again."""
    names = [place.stream, other_stream]
    for name in names:
        place.put(*orders(5), to=name)
    place.record(*names, keys=["order_id"])
    for name in names:
        place.put(*orders(5, start=5), to=name)
    with StreamReader.open(place.amqp) as reader:
        for name in names:
            plan_backfill(place.engine, reader, "/", name, None)
    ((stream_id,),) = place.sql("SELECT stream_id FROM relatum.streams WHERE name = :name", name=place.stream)
    place.sql(f"ALTER TABLE relatum.coverage ADD CHECK (stream_id <> {stream_id} OR is_tail) NOT VALID")
    with place.recording(*names):
        wait_until(lambda: not place.status(other_stream).lag_offsets, what="no gap")
    assert place.status().gaps == [(5, 10)]
