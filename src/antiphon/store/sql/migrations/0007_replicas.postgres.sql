-- The last transaction of each connection that changed anything, written in that transaction: whether a commit whose
-- answer was lost took place is seen from it (see store/postgres/commits.py). Rows of old connections are removed.
CREATE TABLE commits (
  connection  TEXT    PRIMARY KEY,
  number      BIGINT  NOT NULL,
  at          BIGINT  NOT NULL
) WITH (fillfactor = 50);

-- What transactions pass that must not happen at once although they change no row in common (see `Tx.alone`).
CREATE TABLE turnstiles (
  id      INTEGER PRIMARY KEY,
  passed  BIGINT  NOT NULL
) WITH (fillfactor = 50);
INSERT INTO turnstiles (id, passed) SELECT i, 0 FROM generate_series(0, 16383) AS i;
