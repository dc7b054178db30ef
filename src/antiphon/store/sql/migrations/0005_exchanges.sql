-- What follows from a run: conversations between sessions, tasks of sub-agents, and words on their way to people.

-- A run may be one step of an exchange or of a task, which then goes on in the commit that ends the run.
ALTER TABLE runs ADD COLUMN exchange BIGINT;
ALTER TABLE runs ADD COLUMN task BIGINT;
-- Everything that one message has led to is one chain; `hop` counts how far this run is from its beginning.
ALTER TABLE runs ADD COLUMN chain TEXT;
ALTER TABLE runs ADD COLUMN hop INTEGER NOT NULL DEFAULT 0;

-- What a spawned session may have at most (JSON); it was computed once, and whatever it spawns has no more.
ALTER TABLE sessions ADD COLUMN envelope TEXT;
-- Set while a session has ended its turn to wait for what it spawned: 'all' of it, or 'any'.
ALTER TABLE sessions ADD COLUMN yielded TEXT CHECK (yielded IN ('all', 'any'));
-- The run that did so. What it was to answer is answered by the run that the session is woken for.
ALTER TABLE sessions ADD COLUMN yield_run TEXT;
CREATE INDEX sessions_yielded ON sessions (yield_run) WHERE yield_run IS NOT NULL;
ALTER TABLE runs ADD COLUMN yielded INTEGER NOT NULL DEFAULT 0;

CREATE TABLE chains (
  id          TEXT    PRIMARY KEY,
  runs        INTEGER NOT NULL,
  created_at  BIGINT  NOT NULL
);

-- One row per `sessions_send`. `current` is the run it is in; only the end of that run moves it on.
CREATE TABLE exchanges (
  n                  {ID},
  id                 TEXT    NOT NULL UNIQUE,
  requester          BIGINT,
  requester_key      TEXT,
  requester_channel  TEXT,
  target             BIGINT  NOT NULL,
  target_key         TEXT    NOT NULL,
  target_channel     TEXT,
  message            TEXT    NOT NULL,
  phase              TEXT    NOT NULL CHECK (phase IN ('primary', 'reply', 'announce', 'settled')),
  current            TEXT    NOT NULL,
  turn               INTEGER NOT NULL DEFAULT 0,
  turns              INTEGER NOT NULL,
  first_reply        TEXT,
  answered_by        TEXT,               -- the run that gave it
  latest_reply       TEXT,
  announce           TEXT    NOT NULL CHECK (announce IN ('target', 'none')),
  announced          TEXT,
  destination        TEXT    NOT NULL,
  chain              TEXT    NOT NULL,
  hop                INTEGER NOT NULL,
  created_at         BIGINT  NOT NULL,
  settled_at         BIGINT
);
CREATE INDEX exchanges_unsettled ON exchanges (n) WHERE settled_at IS NULL;

-- One row per `sessions_spawn`. It outlives its child: what came of it is here.
CREATE TABLE tasks (
  n                {ID},
  id               TEXT    NOT NULL UNIQUE,
  digest           TEXT    NOT NULL,
  requester        BIGINT  NOT NULL,
  requester_key    TEXT    NOT NULL,
  child            BIGINT  NOT NULL,
  child_key        TEXT    NOT NULL,
  child_session_id TEXT    NOT NULL,
  agent_id         TEXT    NOT NULL,
  signature        TEXT    NOT NULL,
  label            TEXT,
  task             TEXT    NOT NULL,
  phase            TEXT    NOT NULL CHECK (phase IN ('running', 'waiting', 'announcing', 'settled')),
  current          TEXT    NOT NULL,
  wakes            INTEGER NOT NULL DEFAULT 1,
  options          TEXT    NOT NULL,
  destination      TEXT    NOT NULL,
  outcome          TEXT,
  error            TEXT,
  result           TEXT,
  result_source    TEXT,
  model            TEXT,
  report           TEXT,
  announced        TEXT,
  chain            TEXT    NOT NULL,
  hop              INTEGER NOT NULL,
  created_at       BIGINT  NOT NULL,
  started_at       BIGINT,
  ended_at         BIGINT,
  settled_at       BIGINT,
  archive_at       BIGINT,
  archived_at      BIGINT
);
CREATE INDEX tasks_of ON tasks (requester, n);
CREATE INDEX tasks_under_way ON tasks (requester, n) WHERE phase <> 'settled';
CREATE INDEX tasks_waiting ON tasks (n) WHERE phase = 'waiting';
CREATE INDEX tasks_by_child ON tasks (child_key);
CREATE INDEX tasks_alike ON tasks (signature, n) WHERE outcome IS NOT NULL;
CREATE INDEX tasks_to_archive ON tasks (archive_at) WHERE archive_at IS NOT NULL AND archived_at IS NULL;

-- The outbox. `key` is what the words are about, never an attempt to send them: it makes them once.
CREATE TABLE deliveries (
  n            {ID},
  key          TEXT    NOT NULL UNIQUE,
  kind         TEXT    NOT NULL,
  session      BIGINT  NOT NULL,
  session_key  TEXT    NOT NULL,
  destination  TEXT    NOT NULL,
  place        TEXT    NOT NULL, -- words for the same place go out in their order
  body         TEXT    NOT NULL,
  stats        TEXT,
  entry_run    TEXT,             -- the run in whose entries the words already stand in that session
  exchange     BIGINT,
  task         BIGINT,
  state        TEXT    NOT NULL DEFAULT 'pending' CHECK (state IN
                 ('pending', 'sending', 'delivered', 'blocked', 'ambiguous', 'dead')),
  attempts     INTEGER NOT NULL DEFAULT 0,
  doubtful     INTEGER NOT NULL DEFAULT 0, -- an attempt may have got through although nobody said so
  next_at      BIGINT  NOT NULL,
  owner        TEXT,
  message_id   TEXT,
  error        TEXT,
  created_at   BIGINT  NOT NULL,
  settled_at   BIGINT
);
CREATE INDEX deliveries_due ON deliveries (next_at, n) WHERE state = 'pending';
CREATE INDEX deliveries_by_place ON deliveries (place, n) WHERE state IN ('pending', 'sending');
CREATE INDEX deliveries_sending ON deliveries (n) WHERE state = 'sending';
CREATE INDEX deliveries_by_state ON deliveries (state, n);

-- Who waits for whom, while both are at it: a wait that would close a circle is refused.
CREATE TABLE waits (
  run      BIGINT NOT NULL,
  session  BIGINT NOT NULL,
  awaited  TEXT   NOT NULL,
  target   BIGINT NOT NULL,
  until    BIGINT NOT NULL,
  PRIMARY KEY (run, awaited)
);
CREATE INDEX waits_of ON waits (session);
