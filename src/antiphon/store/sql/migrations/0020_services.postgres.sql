ALTER TABLE deliveries ADD COLUMN expires_at BIGINT;  -- after this it is not sent any more
ALTER TABLE deliveries DROP CONSTRAINT deliveries_state_check;
ALTER TABLE deliveries ADD CONSTRAINT deliveries_state_check CHECK (state IN
  ('pending', 'sending', 'delivered', 'blocked', 'ambiguous', 'dead', 'expired'));
DROP INDEX deliveries_over;
CREATE INDEX deliveries_over ON deliveries (settled_at) WHERE state IN ('delivered', 'blocked', 'expired');
