-- oldest: 8
-- Tokens of `antiphon tokens issue` where several replicas share this database: only digests, never a token.

CREATE TABLE tokens (
  name          TEXT   PRIMARY KEY,
  scopes        TEXT   NOT NULL,
  digest        TEXT   NOT NULL UNIQUE,
  created_at    BIGINT NOT NULL,
  last_used_at  BIGINT
);
