-- Search over what was said. The words are indexed some time after they were said, behind a cursor of their own,
-- so that nobody's append waits for it.

-- One row: every message up to this one is indexed.
CREATE TABLE search_cursor (
  id       INTEGER PRIMARY KEY CHECK (id = 1),
  message  BIGINT  NOT NULL
);
INSERT INTO search_cursor (id, message) VALUES (1, 0);
