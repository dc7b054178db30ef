-- oldest: 8
-- Messages from chat services: what was taken, who may write, and which process receives for an account.

-- Every event of a service that was decided about, so that a repetition has no effect. Kept as long as the service repeats.
CREATE TABLE inbound_events (
  channel     TEXT    NOT NULL,
  account     TEXT    NOT NULL,
  event_id    TEXT    NOT NULL,           -- as the service names it; unique in an account
  state       TEXT    NOT NULL,           -- decided, failing (it will be tried again), dead (given up)
  outcome     TEXT,                       -- run, command, context, challenge, ignored
  reason      TEXT,                       -- why, or the error
  attempts    INTEGER NOT NULL DEFAULT 0, -- failed ones
  run_id      TEXT,
  session_key TEXT,
  received_at BIGINT  NOT NULL,
  expires_at  BIGINT  NOT NULL,
  PRIMARY KEY (channel, account, event_id)
);
CREATE INDEX inbound_events_old ON inbound_events (expires_at);
CREATE INDEX inbound_events_dead ON inbound_events (channel, account) WHERE state = 'dead';

-- What was said in a group without addressing the agent. It goes to the agent with the next message that does.
CREATE TABLE group_context (
  n         {ID},
  place     TEXT   NOT NULL,              -- channel|account|chat|thread
  sender    TEXT   NOT NULL,
  text      TEXT   NOT NULL,
  sent_at   BIGINT NOT NULL
);
CREATE INDEX group_context_by_place ON group_context (place, n);
CREATE INDEX group_context_old ON group_context (sent_at);

-- People who asked to write to an account directly, and those who were allowed to. Groups never read it.
CREATE TABLE pairings (
  channel      TEXT    NOT NULL,
  account      TEXT    NOT NULL,
  sender       TEXT    NOT NULL,
  name         TEXT,
  state        TEXT    NOT NULL,          -- pending, approved
  code         TEXT,                      -- while it is pending
  is_owner     INTEGER NOT NULL DEFAULT 0,
  requested_at BIGINT  NOT NULL,
  expires_at   BIGINT,                    -- of the code
  approved_at  BIGINT,
  PRIMARY KEY (channel, account, sender)
);

-- Which process receives for an account, and wrong codes that were entered for it.
CREATE TABLE channel_accounts (
  channel      TEXT    NOT NULL,
  account      TEXT    NOT NULL,
  receiver     TEXT,
  lease_until  BIGINT  NOT NULL DEFAULT 0,
  wrong_codes  INTEGER NOT NULL DEFAULT 0,
  locked_until BIGINT  NOT NULL DEFAULT 0,
  PRIMARY KEY (channel, account)
);
