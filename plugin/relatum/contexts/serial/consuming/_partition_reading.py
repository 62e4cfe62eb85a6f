"""The thread that reads a partition: it opens it where it was left, and reads on through whatever happens."""

import threading
import time
from collections.abc import Callable
from typing import Final

from relatum.contexts.placement._entries import Adoption
from relatum.contexts.serial._partition_log import PartitionLog
from relatum.contexts.serial.consuming._partition_following import Following, Piece
from relatum.contexts.serial.consuming._serial_state import Shared, logger
from relatum.contexts.serial.consuming._serial_store import ConsumerStore, Opened
from relatum.errors import (
    AccessRefused,
    ConfigurationError,
    OffsetExpired,
    OffsetNotFound,
    StreamNotFound,
    StreamUnavailable,
    Transient,
)
from relatum.reading import Agreement, BrokerAddress, Message, Position, StreamReader, agreement, position_of
from relatum.waiting import backoff

IDLE_S: Final = 0.1
"""How often a reader with nothing to read looks whether it should stop."""


class PartitionReader:
    """Reads one partition this member has, in a thread of its own.

    Args:
        shared: What the member's threads share.
        store: The consumer's rows.
        address: The broker.
        partition_id: The partition.
        stream: Its stream.
        header: The header that names contexts.
        gained: Called when the partition is open for the first time.
    """

    def __init__(
        self,
        shared: Shared,
        store: ConsumerStore,
        address: BrokerAddress,
        *,
        partition_id: int,
        stream: str,
        header: str,
        gained: Callable[[str], None],
    ) -> None:
        self.partition_id = partition_id
        self.stream = stream
        self.following: Following | None = None
        self.is_gained = False
        self._shared = shared
        self._store = store
        self._address = address
        self._header = header
        self._gained = gained
        self._who = f"reading of partition {stream!r}"
        self._partitions: frozenset[str] = frozenset()
        self._is_over = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"relatum-{stream}", daemon=True)

    def stop(self) -> None:
        """End soon, and read nothing more."""
        self._is_over.set()
        if self.following is not None:
            self._shared.drop(self.following)

    @property
    def has_ended(self) -> bool:
        """Whether the partition turned out to be another member's, or gone."""
        return not self.thread.is_alive()

    def _must_stop(self, following: Following | None = None) -> bool:
        is_over = following is not None and following.is_over
        return is_over or self._is_over.is_set() or self._shared.stopping.is_set()

    def _run(self) -> None:
        pauses = backoff()
        while not self._must_stop():
            try:
                if not self._session():
                    break
                pauses = backoff()
            except Exception as error:  # noqa: BLE001 - whatever it was, the partition is opened again
                self._note(error)
            self._is_over.wait(next(pauses))
        self._is_over.set()
        self._shared.outages.forget(self._who)

    def _note(self, error: Exception) -> None:
        """Say what stands in the way of reading, once."""
        self._shared.outages.failed(self._who, error)

    def _session(self) -> bool:
        """Open the partition as it is stored and read it until it is lost or dropped; False where it is not ours."""
        try:
            with self._reader() as reader:
                opened = self._store.open(self.partition_id)
                if opened is None:
                    return False
                following = self._opened(reader, opened)
                if following is None or self._must_stop():
                    return True
                self._begin(following)
                try:
                    self._follow(reader, following)
                    while not self._must_stop(following):
                        self._attach_again(following)
                finally:
                    self._shared.drop(following)
        except StreamNotFound:
            if self._store.drain(self.partition_id):
                logger.info("partition %r drained: its stream is gone", self.stream, extra={"stream": self.stream})
                return False
            raise
        return True

    def _reader(self) -> StreamReader:
        """A reader; a broker that lets nobody in is told to those who wait for messages, too."""
        try:
            reader = StreamReader.open(self._address)
        except (AccessRefused, ConfigurationError) as error:
            self._shared.refused(error)
            raise
        self._shared.admitted()
        return reader

    def _begin(self, following: Following) -> None:
        self._shared.outages.over(self._who)
        extra = {"stream": self.stream, "position": following.position, "from": following.next_offset}
        logger.info("partition %r opened", self.stream, extra=extra)
        self.following = following
        self._shared.add(following)
        if not self.is_gained:
            self.is_gained = True
            self._gained(self.stream)

    def _opened(self, reader: StreamReader, opened: Opened) -> Following | None:
        """The partition as it is stored; None where its stream is another one now: open it again."""
        if opened.known_by is not None and not self._agrees(reader, opened.known_by):
            self._go_back(reader)
            return None
        bounds = reader.bounds(self.stream)
        first = max(opened.read_from, bounds.first or 0)
        following = Following(
            self.partition_id,
            self.stream,
            log=PartitionLog(
                self._store.floors(self.partition_id, opened.read_from),
                open_holds=opened.holds,
                position=opened.position,
            ),
            position=opened.position,
            version=opened.version,
            read_from=first,
            header=self._header,
            options=self._shared.options,
            begun_at={move_id: time.monotonic() - open_s for move_id, open_s in opened.since.items()},
        )
        self._replay_lost(following, opened, first)
        return following

    def _agrees(self, reader: StreamReader, position: Position) -> bool:
        """Whether the stream is still the one of which that was read.

        Raises:
            StreamUnavailable: Nobody can say so now: a replica lags, a node starts. Nothing is concluded from that.
        """
        found = agreement(reader, self.stream, position)
        if found is Agreement.UNKNOWN:
            raise StreamUnavailable(
                f"{self.stream!r} does not show offset {position.offset}, which was read: a replica is behind, or the "
                "leader cannot be asked; waiting",
                stream=self.stream,
            )
        return found not in (Agreement.OTHER, Agreement.ENDS_BEFORE)

    def _go_back(self, reader: StreamReader) -> None:
        """The stream is not what was read: go on at the last place where both agree; from its beginning if nowhere."""
        checkpoints = self._store.checkpoints(self.partition_id)
        low, high = 0, len(checkpoints)
        # What agrees is a prefix: by halving.
        while low < high:
            middle = (low + high) // 2
            if self._agrees(reader, checkpoints[middle]):
                low = middle + 1
            else:
                high = middle
        bounds = reader.bounds(self.stream)
        first = bounds.first or 0
        agreed = checkpoints[low - 1] if low else None
        # Of what retention has dropped nothing can be said: another stream may have come that far, too.
        if agreed is None or agreed.offset < first:
            logger.warning("stream %r replaced", self.stream, extra={"stream": self.stream})
            self._store.begin_anew(self.partition_id, first)
            return
        end = first if bounds.last is None else bounds.last + 1
        extra = {"stream": self.stream, "from": agreed.offset + 1}
        logger.warning("stream %r lost its end: read again from %d", self.stream, agreed.offset + 1, extra=extra)
        self._store.go_back(self.partition_id, agreed, end)

    def _replay_lost(self, following: Following, opened: Opened, first: int) -> None:
        """What fences and markers said that retention has dropped still counts for what is behind them."""
        if first <= opened.read_from:
            return
        now = time.monotonic()
        for offset, control in self._store.lost_controls(self.partition_id, opened.read_from, first):
            following.replay(offset, control, now)
        following.lost_to(first, now)
        if opened.position < first and opened.position > 0:
            extra = {"stream": self.stream, "from": opened.position, "to": first}
            lost = (opened.position, first - 1, self.stream)
            logger.warning("retention dropped offsets %d to %d of %r before they were consumed", *lost, extra=extra)

    def _attach_again(self, following: Following) -> None:
        """Read on where reading was interrupted; what was read before stays."""
        pauses = backoff()
        while not self._must_stop(following):
            try:
                with StreamReader.open(self._address) as reader:
                    if self._is_another(reader, following):
                        return
                    return self._follow(reader, following)
            except Transient as error:
                self._note(error)
            self._is_over.wait(next(pauses))

    def _is_another(self, reader: StreamReader, following: Following) -> bool:
        """Whether the stream does not hold any more what was read of it last: then all is looked at anew."""
        last = following.last_read
        if last is None or self._agrees(reader, position_of(last)):
            return False
        self._shared.drop(following)
        return True

    def _follow(self, reader: StreamReader, following: Following) -> None:
        try:
            for batch in reader.batches(self.stream, following.next_offset, follow=True, idle_s=IDLE_S):
                if self._must_stop(following):
                    return
                self._shared.outages.over(self._who)
                if batch is None:
                    continue
                if batch.first_offset > following.next_offset and self._is_hole(following):
                    self._shared.drop(following)
                    return
                piece = Piece.of(batch, self._read_adopted, self._is_partition)
                self._shared.put(following, lambda now, piece=piece: following.put(piece, now))  # type: ignore[misc]
                while not self._shared.wait_for_room(following, IDLE_S):
                    if self._must_stop(following):
                        return
        except Transient as error:
            self._note(error)

    def _is_hole(self, following: Following) -> bool:
        """Whether retention overtook the reader; streams have gaps in good health, too, so the stream is asked."""
        with StreamReader.open(self._address) as observer:
            first = observer.bounds(self.stream).first
        return first is not None and first > following.next_offset

    def _is_partition(self, stream: str) -> bool:
        if stream not in self._partitions:
            self._partitions = self._store.partitions()
        if stream in self._partitions:
            return True
        extra = {"stream": self.stream, "named": stream}
        logger.warning("a control message in %r that names %r is passed over", self.stream, stream, extra=extra)
        return False

    def _read_adopted(self, adoption: Adoption) -> Message | None:
        """The message an adoption names; None where retention has dropped it, or its partition is gone.

        It was confirmed before it was adopted. So where it is not to be seen, a replica is behind, and is waited for;
        it is given up only where its stream's leader says that there is none: the stream was declared again since.
        """
        pauses = backoff()
        while True:
            try:
                with StreamReader.open(self._address) as observer:
                    return observer.read(adoption.stream, adoption.offset)
            except (OffsetExpired, StreamNotFound):
                break
            except OffsetNotFound as error:
                if error.is_proven:
                    break
                self._note(error)
            except StreamUnavailable as error:
                self._note(error)
            if self._is_over.wait(next(pauses)):
                return None
        extra = {"stream": adoption.stream, "offset": adoption.offset}
        logger.warning(
            "an adopted message, %r at %d, is not there any more", adoption.stream, adoption.offset, extra=extra
        )
        return None
