-- SQLite cannot change a CHECK, so the table is made anew.
CREATE TABLE deliveries_new (
  n            INTEGER PRIMARY KEY AUTOINCREMENT,
  key          TEXT    NOT NULL UNIQUE,
  kind         TEXT    NOT NULL,
  session      BIGINT  NOT NULL,
  session_key  TEXT    NOT NULL,
  destination  TEXT    NOT NULL,
  place        TEXT    NOT NULL, -- texts for the same place go out in their order
  body         TEXT    NOT NULL,
  stats        TEXT,
  entry_run    TEXT,             -- the run in whose entries the text already stands in that session
  exchange     BIGINT,
  task         BIGINT,
  state        TEXT    NOT NULL DEFAULT 'pending' CHECK (state IN
                 ('pending', 'sending', 'delivered', 'blocked', 'ambiguous', 'dead', 'expired')),
  attempts     INTEGER NOT NULL DEFAULT 0,
  doubtful     INTEGER NOT NULL DEFAULT 0, -- an attempt may have arrived although its outcome is unknown
  next_at      BIGINT  NOT NULL,
  owner        TEXT,
  message_id   TEXT,
  error        TEXT,
  created_at   BIGINT  NOT NULL,
  settled_at   BIGINT,
  expires_at   BIGINT            -- after this it is not sent any more
);
INSERT INTO deliveries_new (n, key, kind, session, session_key, destination, place, body, stats, entry_run, exchange,
                            task, state, attempts, doubtful, next_at, owner, message_id, error, created_at, settled_at)
SELECT n, key, kind, session, session_key, destination, place, body, stats, entry_run, exchange,
       task, state, attempts, doubtful, next_at, owner, message_id, error, created_at, settled_at FROM deliveries;
-- Numbers that were given out are not given out again.
DELETE FROM sqlite_sequence WHERE name = 'deliveries_new';
INSERT INTO sqlite_sequence (name, seq) SELECT 'deliveries_new', seq FROM sqlite_sequence WHERE name = 'deliveries';
DROP TABLE deliveries;
ALTER TABLE deliveries_new RENAME TO deliveries;
CREATE INDEX deliveries_due ON deliveries (next_at, n) WHERE state = 'pending';
CREATE INDEX deliveries_by_place ON deliveries (place, n) WHERE state IN ('pending', 'sending');
CREATE INDEX deliveries_sending ON deliveries (n) WHERE state = 'sending';
CREATE INDEX deliveries_by_state ON deliveries (state, n);
CREATE INDEX deliveries_by_session ON deliveries (session);
CREATE INDEX deliveries_over ON deliveries (settled_at) WHERE state IN ('delivered', 'blocked', 'expired');
CREATE INDEX deliveries_elsewhere ON deliveries (state) WHERE state <> 'delivered';
