"""Tables for tests that look at their rows or change them: the product names them in SQL alone."""

import sqlalchemy as sa


def _table(name: str, columns: str) -> sa.TableClause:
    return sa.table(name, *map(sa.column, columns.split()), schema="relatum")


streams = _table("streams", "stream_id name lease_holder replaced_at")
receipts = _table("receipts", "message_id stream_id stream_offset")
super_streams = _table("super_streams", "super_stream_id vhost name header")
super_stream_partitions = _table(
    "super_stream_partitions", "partition_id super_stream_id stream binding_key place state open_sets"
)
recorder_members = _table("recorder_members", "holder name lease_expires_at")
serial_members = _table("serial_members", "consumer_id holder lease_expires_at")
collector_members = _table("collector_members", "holder lease_expires_at")
group_states = _table("group_states", "holder lease_expires_at")
serial_consumers = _table("serial_consumers", "consumer_id super_stream_id name")
serial_positions = _table(
    "serial_positions",
    "consumer_id partition_id holder position version last_offset last_fingerprint last_chunk_ms",
)
serial_holds = _table(
    "serial_holds", "consumer_id partition_id source_id move_id marker_offset cursor epoch fence_offset held"
)
placements = _table(
    "placements", "super_stream_id partition_id name state epoch generation move_id opened_at used_at released_at"
)
context_moves = _table(
    "context_moves",
    "move_id super_stream_id source_id target_id state attempt contexts fence_epoch epoch scan_from target_scan_from "
    "fence_offset marker_offset holder lease_expires_at fenced_at ended_at aborting generation",
)
moved_contexts = _table("moved_contexts", "move_id name from_epoch")
placement_epochs = sa.Sequence("placement_epochs", schema="relatum")
settlements = _table("settlements", "token is_void written_at")
