-- oldest: 8
-- The session that all agents share is stored as what it is called, `main`, so that no door has to translate its key.
-- A replica of the version before that still has the old name begins another one until it is replaced, too.

UPDATE transcripts SET key = 'main' WHERE key = 'global';
UPDATE sessions SET key = 'main' WHERE key = 'global';
UPDATE sessions SET parent_key = 'main' WHERE parent_key = 'global';
UPDATE sessions SET root_key = 'main' WHERE root_key = 'global';
UPDATE usage SET session_key = 'main' WHERE session_key = 'global';
UPDATE usage SET root_key = 'main' WHERE root_key = 'global';
UPDATE exchanges SET requester_key = 'main' WHERE requester_key = 'global';
UPDATE exchanges SET target_key = 'main' WHERE target_key = 'global';
UPDATE tasks SET requester_key = 'main' WHERE requester_key = 'global';
UPDATE deliveries SET session_key = 'main' WHERE session_key = 'global';
UPDATE commands SET id = 'forgotten:main ' || answer WHERE id LIKE 'forgotten:global %';

-- Who answers in that session is who was spoken to; NULL is the agent that the session belongs to.
ALTER TABLE runs ADD COLUMN agent_id TEXT;
