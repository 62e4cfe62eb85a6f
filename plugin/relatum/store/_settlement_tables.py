"""The table by which a commit in doubt is settled; see `relatum.store._settling`.

- `settlements`: one row for each step whose writer does not know its outcome for sure yet, and for each that was found
  to have been rolled back. A writer removes its rows as it goes on; what is left of those that died is removed by age.
"""

from sqlalchemy import Boolean, Column, Table, Uuid, text

from relatum.store._tables import made_at, metadata

settlements = Table(
    "settlements",
    metadata,
    # Ascending with time, so that the index is written at its end.
    Column("token", Uuid, primary_key=True),
    made_at("written_at"),
    # Written by one who settles: the step was rolled back, and can come through no more.
    Column("is_void", Boolean, nullable=False, server_default=text("false")),
    # Each row lives for a moment: a small table that is cleaned often.
    postgresql_with={"autovacuum_vacuum_scale_factor": "0.0", "autovacuum_vacuum_threshold": "10000"},
)
