-- oldest: 8
-- A tool call that a person must allow before it runs. A call has at most one row, so it is asked about once.

CREATE TABLE approvals (
  id          TEXT    PRIMARY KEY,        -- random; people name it in commands
  call        TEXT    NOT NULL UNIQUE,    -- the key of the tool call
  run_id      TEXT    NOT NULL,
  session     BIGINT  NOT NULL,
  session_key TEXT    NOT NULL,
  agent_id    TEXT    NOT NULL,
  tool        TEXT    NOT NULL,
  question    TEXT    NOT NULL,           -- what people are shown
  binding     TEXT    NOT NULL,           -- SHA-256 of the call and the facts that the decision is about
  subject     TEXT,                       -- the whole call that `allow-always` would cover; NULL: it can be allowed once
  state       TEXT    NOT NULL,           -- pending, allowed, denied, expired
  always      INTEGER NOT NULL DEFAULT 0, -- allowed for good, now or by an earlier grant
  decided_by  TEXT,
  created_at  BIGINT  NOT NULL,
  expires_at  BIGINT  NOT NULL,
  decided_at  BIGINT,
  started_at  BIGINT                      -- when the allowed call began: it is not begun a second time
);
CREATE INDEX approvals_pending ON approvals (created_at) WHERE state = 'pending';
CREATE INDEX approvals_of_session ON approvals (session, created_at);
CREATE INDEX approvals_of_run ON approvals (run_id) WHERE state = 'pending';

-- Calls that people allowed for good: one agent, one tool, one whole call under the same facts.
CREATE TABLE approval_grants (
  id         TEXT   PRIMARY KEY,
  agent_id   TEXT   NOT NULL,
  tool       TEXT   NOT NULL,
  digest     TEXT   NOT NULL,             -- SHA-256 of the subject and the facts
  subject    TEXT   NOT NULL,
  decided_by TEXT,
  created_at BIGINT NOT NULL,
  UNIQUE (agent_id, tool, digest)
);
