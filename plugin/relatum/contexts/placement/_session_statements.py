"""The SQL of publishers' sessions: each statement once, built with SQLAlchemy, its parameters bound."""

from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from relatum.store import NOW, context_moves, leased, publisher_sessions

_sessions: Final = publisher_sessions.c
_moves: Final = context_moves.c
_OF_SUPER_STREAM: Final = sa.bindparam("of_super_stream", type_=sa.Integer)

# A placement that a crash of PostgreSQL takes back would be made again elsewhere, with messages in the first place; a
# session that it takes back would be waited for by nobody.
_COMMITS: Final = "synchronous_commit"
KEEP_COMMITS: Final = sa.case(
    (sa.func.current_setting(_COMMITS) == "off", sa.func.set_config(_COMMITS, "on", True)), else_=sa.null()
).label("kept")

_BY: Final = sa.bindparam("by", type_=sa.Text)
_KEPT_FOR: Final = sa.func.make_interval(0, 0, 0, 1)
# One lets another pass: what is forgotten, any may forget.
_forgotten: Final = (
    sa.delete(publisher_sessions)
    .where(
        _sessions.super_stream_id == _OF_SUPER_STREAM,
        _sessions.holder.in_(
            sa.select(_sessions.holder)
            .where(
                _sessions.super_stream_id == _OF_SUPER_STREAM,
                _sessions.holder != _BY,  # one statement cannot delete a row and write it
                _sessions.lease_expires_at < NOW - _KEPT_FOR,
            )
            .with_for_update(skip_locked=True)
        ),
    )
    .cte("forgotten")
)
_seen: Final = sa.bindparam("has_seen", type_=sa.BigInteger)
_SESSION_S: Final = sa.bindparam("holds_s", type_=sa.Float)
_renewed: Final = leased(_SESSION_S) | {"seen": _seen, "session_s": _SESSION_S}

renew_session: Final = (
    insert(publisher_sessions)
    .values({"super_stream_id": _OF_SUPER_STREAM, "holder": _BY} | _renewed)
    .on_conflict_do_update(constraint="publisher_sessions_holder", set_={**_renewed, "beat": _sessions.beat + 1})
    .returning(KEEP_COMMITS)
    .add_cte(_forgotten)
)
"""Writes a session. It also forgets those of a day ago, whose routers died: without moves, nobody else does."""

end_session: Final = sa.delete(publisher_sessions).where(
    _sessions.super_stream_id == _OF_SUPER_STREAM, _sessions.holder == _BY
)

is_waited_for: Final = sa.and_(
    _sessions.super_stream_id == _moves.super_stream_id, _sessions.seen < _moves.generation, _moves.fence_epoch == 0
)
"""Whether a session is one that a move waits for before its fence."""

waited_for: Final = sa.func.array(
    sa.select(_sessions.holder).where(is_waited_for).correlate(context_moves).scalar_subquery()
).label("waits_for")
"""The holders of those, of each move."""
