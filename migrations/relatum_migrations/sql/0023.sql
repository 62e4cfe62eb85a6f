-- From release 0.4, first step: which part a row is in. Of all rows that are there, and of those that release 0.4 still
-- writes, it is part 0.
--
-- Locks: ACCESS EXCLUSIVE on `relationships` for a moment; no row is read or rewritten. A transaction of its own: the
-- next step reads all rows to check the constraint, and blocks nobody meanwhile.
ALTER TABLE relatum.relationships ADD COLUMN part integer NOT NULL DEFAULT 0;
ALTER TABLE relatum.relationships ADD CONSTRAINT relationships_part CHECK (part = 0) NOT VALID;
