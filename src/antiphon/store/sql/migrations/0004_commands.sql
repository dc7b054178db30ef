-- Commands that were carried out, by their idempotency keys. They name nothing else in here: what a command was about
-- (a session, a job) may be gone, and its key must still stand for what it stood for.

CREATE TABLE commands (
  id          TEXT   PRIMARY KEY,
  digest      TEXT   NOT NULL,
  answer      TEXT   NOT NULL,
  created_at  BIGINT NOT NULL
);
