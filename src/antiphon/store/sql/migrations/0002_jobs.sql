-- Scheduled jobs. A firing is a run like any other; a job only says when, where and with which words.

CREATE TABLE jobs (
  n                 {ID},
  id                TEXT    NOT NULL UNIQUE,
  name              TEXT    NOT NULL,
  enabled           INTEGER NOT NULL,
  agent_id          TEXT    NOT NULL,
  schedule          TEXT    NOT NULL,
  session_target    TEXT    NOT NULL,
  payload           TEXT    NOT NULL,
  delivery          TEXT    NOT NULL,
  delete_after_run  INTEGER NOT NULL,
  created_at        BIGINT  NOT NULL,
  updated_at        BIGINT  NOT NULL,
  next_at           BIGINT  CHECK (next_at IS NULL OR enabled = 1),
  last_at           BIGINT,
  last_slot         BIGINT,
  last_run_id       TEXT,
  last_status       TEXT, -- of a firing that led to no run; otherwise the run knows
  last_error        TEXT,
  firings           BIGINT  NOT NULL DEFAULT 0,
  failures          BIGINT  NOT NULL DEFAULT 0
);
CREATE INDEX jobs_due ON jobs (next_at) WHERE next_at IS NOT NULL;
-- What counts against cron.maxConcurrentRuns.
CREATE INDEX runs_of_jobs ON runs (n) WHERE origin = 'cron' AND ended_at IS NULL;
