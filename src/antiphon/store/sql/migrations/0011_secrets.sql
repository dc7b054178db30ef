-- oldest: 8
-- Random values that every replica on this database has to agree on, made by the first that needs one.

CREATE TABLE secrets (
  name TEXT PRIMARY KEY,
  value TEXT NOT NULL
);
