-- Sessions, transcripts, runs, lineage and the usage ledger.
-- {ID} is the dialect's growing integer primary key.

-- A transcript is one conversation: a session points at its current one, `/new` gives it another.
-- It names its session by key, so that it still says what it was when the session is gone.
CREATE TABLE transcripts (
  id          {ID},
  session_id  TEXT   NOT NULL UNIQUE,
  key         TEXT   NOT NULL,
  reason      TEXT   NOT NULL,
  started_at  BIGINT NOT NULL,
  ended_at    BIGINT
);
CREATE INDEX transcripts_of_key ON transcripts (key, id);

CREATE TABLE sessions (
  id                {ID},
  key               TEXT    NOT NULL UNIQUE,
  session_id        TEXT    NOT NULL UNIQUE,
  transcript        BIGINT  NOT NULL,
  agent_id          TEXT    NOT NULL,
  kind              TEXT    NOT NULL,
  chat_type         TEXT,
  channel           TEXT,
  label             TEXT,
  display_name      TEXT,
  subject           TEXT,
  last_channel      TEXT,
  last_to           TEXT,
  last_account      TEXT,
  last_thread       TEXT,
  model             TEXT,
  thinking          TEXT,
  "verbose"         TEXT,
  send_policy       TEXT CHECK (send_policy IN ('allow', 'deny')),
  spawned_by        BIGINT,
  parent_key        TEXT,
  children          INTEGER NOT NULL DEFAULT 0,
  root_key          TEXT,
  depth             INTEGER NOT NULL DEFAULT 0,
  role              TEXT,
  sandboxed         INTEGER NOT NULL DEFAULT 0,
  state             TEXT    NOT NULL DEFAULT 'idle' CHECK (state IN ('idle', 'running')),
  system_sent       INTEGER NOT NULL DEFAULT 0,
  aborted_last_run  INTEGER NOT NULL DEFAULT 0,
  input_tokens      BIGINT  NOT NULL DEFAULT 0,
  output_tokens     BIGINT  NOT NULL DEFAULT 0,
  total_tokens      BIGINT  NOT NULL DEFAULT 0,
  context_tokens    BIGINT,
  last_model        TEXT,
  last_seq          BIGINT  NOT NULL DEFAULT 0,
  lane_epoch        BIGINT  NOT NULL DEFAULT 0,
  extra             TEXT,
  created_at        BIGINT  NOT NULL,
  updated_at        BIGINT  NOT NULL,
  archived          INTEGER NOT NULL DEFAULT 0,
  archived_at       BIGINT
);
-- Every list is a merge of streams that are equal in (archived, kind) or (agent_id, archived, kind),
-- so two indexes serve every filter (see store/listing.py).
CREATE INDEX sessions_by_kind   ON sessions (archived, kind, updated_at DESC, key);
CREATE INDEX sessions_by_agent  ON sessions (agent_id, archived, kind, updated_at DESC, key);
CREATE INDEX sessions_by_parent ON sessions (spawned_by, updated_at DESC, key) WHERE spawned_by IS NOT NULL;
CREATE INDEX sessions_by_label  ON sessions (label, updated_at DESC, key) WHERE label IS NOT NULL;

-- The closure of "was spawned by": one row per ancestor, so that a tree needs no recursion.
CREATE TABLE lineage (
  ancestor    BIGINT NOT NULL,
  descendant  BIGINT NOT NULL,
  PRIMARY KEY (ancestor, descendant)
);
CREATE INDEX lineage_up ON lineage (descendant, ancestor);

-- Append only; `body` is the raw transcript entry and is never rewritten.
CREATE TABLE messages (
  id          {ID},
  transcript  BIGINT NOT NULL,
  seq         BIGINT NOT NULL,
  entry       TEXT   NOT NULL,
  role        TEXT   NOT NULL,
  run         BIGINT,
  body        TEXT   NOT NULL,
  created_at  BIGINT NOT NULL
);
CREATE UNIQUE INDEX messages_in_order ON messages (transcript, seq);
CREATE INDEX messages_compactions ON messages (transcript, seq) WHERE role = 'compaction';

CREATE TABLE runs (
  n              {ID},
  id             TEXT    NOT NULL UNIQUE,
  session        BIGINT  NOT NULL REFERENCES sessions (id),
  origin         TEXT    NOT NULL,
  digest         TEXT    NOT NULL,
  input          TEXT    NOT NULL,
  instructions   TEXT,
  model          TEXT,
  thinking       TEXT,
  target         TEXT,
  deadline_at    BIGINT, -- NULL: the default applies, counted from created_at
  state          TEXT    NOT NULL DEFAULT 'queued' CHECK (state IN
                   ('queued', 'running', 'ok', 'error', 'timeout', 'cancelled', 'interrupted', 'incomplete')),
  cancel_at      BIGINT,
  owner          TEXT,
  epoch          BIGINT  NOT NULL DEFAULT 0,
  attempts       INTEGER NOT NULL DEFAULT 0,
  transcript     BIGINT,
  first_seq      BIGINT,
  last_seq       BIGINT,
  reply          TEXT,
  error_code     TEXT,
  error          TEXT,
  model_answered TEXT,
  created_at     BIGINT  NOT NULL,
  started_at     BIGINT,
  ended_at       BIGINT
);
-- The law of the lane: at most one active run in a session, whatever any process believes.
CREATE UNIQUE INDEX runs_one_active ON runs (session) WHERE state = 'running';
CREATE INDEX runs_queued ON runs (session, n) WHERE state = 'queued';
-- Partial, so that no plan for a queue can choose it and walk through everything a session ever ran.
CREATE INDEX runs_ended ON runs (session) WHERE ended_at IS NOT NULL;
CREATE INDEX runs_due ON runs (deadline_at) WHERE state = 'queued' AND deadline_at IS NOT NULL;

-- One row per process that executes runs. A run's lease is its owner's: one heartbeat renews them all.
CREATE TABLE owners (
  id           TEXT   PRIMARY KEY,
  lease_until  BIGINT NOT NULL
);

-- Append only, one row per model call; names its session by key because it outlives it.
CREATE TABLE usage (
  id           {ID},
  at           BIGINT NOT NULL,
  run_id       TEXT   NOT NULL,
  session_key  TEXT   NOT NULL,
  session_id   TEXT   NOT NULL,
  root_key     TEXT   NOT NULL,
  agent_id     TEXT   NOT NULL,
  provider     TEXT,
  model        TEXT,
  input        BIGINT NOT NULL,
  output       BIGINT NOT NULL,
  cache_read   BIGINT NOT NULL,
  cache_write  BIGINT NOT NULL,
  cost         DOUBLE PRECISION
);
CREATE INDEX usage_of_run ON usage (run_id);
CREATE INDEX usage_of_session ON usage (session_key, session_id);
CREATE INDEX usage_of_root ON usage (root_key, id);
