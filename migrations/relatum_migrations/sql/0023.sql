-- From release 0.4, first step: the part of each row. It is part 0 for all existing rows, and for the rows that release
-- 0.4 still writes.
--
-- Locks: ACCESS EXCLUSIVE on `relationships` for a moment; no row is read or rewritten. A separate transaction, so that
-- the next step can read all rows to check the constraint without blocking other sessions.
ALTER TABLE relatum.relationships ADD COLUMN part integer NOT NULL DEFAULT 0;
ALTER TABLE relatum.relationships ADD CONSTRAINT relationships_part CHECK (part = 0) NOT VALID;
