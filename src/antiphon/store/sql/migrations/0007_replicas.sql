-- Several processes on one store: what each says of itself, and which of them looks after what nobody else does.

ALTER TABLE owners ADD COLUMN name TEXT;
ALTER TABLE owners ADD COLUMN address TEXT;
ALTER TABLE owners ADD COLUMN version TEXT;
ALTER TABLE owners ADD COLUMN started_at BIGINT;
ALTER TABLE owners ADD COLUMN seen_at BIGINT;

-- One row: whoever has it sweeps, until that time.
CREATE TABLE watch (
  id     INTEGER PRIMARY KEY CHECK (id = 1),
  owner  TEXT    NOT NULL,
  until  BIGINT  NOT NULL
);
INSERT INTO watch (id, owner, until) VALUES (1, '', 0);
