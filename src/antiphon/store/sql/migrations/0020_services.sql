-- oldest: 8
-- Deliveries to chat services: what was sent of each, how long it may take, and the waits that services ask for.

-- A delivery to a service in the parts that fit one message there, rendered once. A part with `sent_at` has arrived, so
-- sending goes on with the first one without it.
CREATE TABLE delivery_parts (
  delivery   BIGINT  NOT NULL,
  n          INTEGER NOT NULL,  -- from 1
  text       TEXT    NOT NULL,
  plain      TEXT,              -- the same without markup, if a service refuses the markup
  started_at BIGINT,            -- the first attempt that may have arrived: idempotency windows count from here
  message_id TEXT,
  sent_at    BIGINT,
  PRIMARY KEY (delivery, n)
);

-- Accounts that must not send before a time, because their service said so.
CREATE TABLE channel_holds (
  account TEXT   PRIMARY KEY,   -- channel|account, as the beginning of a place
  until   BIGINT NOT NULL
);
