-- oldest: 8
-- A command that an agent started with `exec`. The row is committed before the keeper of the host is told, and the key
-- of the tool call is the key of the command there: no key ever starts twice.

CREATE TABLE exec_commands (
  key             TEXT    PRIMARY KEY,        -- the key of the tool call
  id              TEXT    NOT NULL UNIQUE,    -- random; agents name it as `sessionId`
  session         BIGINT  NOT NULL,
  session_key     TEXT    NOT NULL,
  agent_id        TEXT    NOT NULL,
  sandboxed       INTEGER NOT NULL,
  run_id          TEXT    NOT NULL,
  host            TEXT    NOT NULL,           -- the state directory whose keeper runs it
  owner           TEXT    NOT NULL,           -- the process that looks after it, as in `owners`
  backend         TEXT    NOT NULL,
  command         TEXT    NOT NULL,
  workdir         TEXT    NOT NULL,
  timeout_seconds INTEGER NOT NULL,
  state           TEXT    NOT NULL,           -- starting, running, ended, failed, lost
  background      INTEGER NOT NULL DEFAULT 0, -- its end is reported to the session
  stop_reason     TEXT,                       -- we are ending it, so its end is not reported
  exit_code       INTEGER,
  signal          INTEGER,
  error           TEXT,
  timed_out       INTEGER NOT NULL DEFAULT 0,
  output          TEXT,                       -- its beginning and end, as a model reads it
  output_bytes    BIGINT  NOT NULL DEFAULT 0,
  output_file     TEXT,                       -- the whole output, relative to the workspace
  read_call       TEXT,                       -- the call that last read new output, and what it read
  read_from       BIGINT  NOT NULL DEFAULT 0,
  read_to         BIGINT  NOT NULL DEFAULT 0,
  removed         INTEGER NOT NULL DEFAULT 0, -- not listed any more
  created_at      BIGINT  NOT NULL,
  ended_at        BIGINT
);
CREATE INDEX exec_commands_live ON exec_commands (session) WHERE state IN ('starting', 'running');
CREATE INDEX exec_commands_of_run ON exec_commands (run_id) WHERE state IN ('starting', 'running');
CREATE INDEX exec_commands_of_session ON exec_commands (session, created_at);
