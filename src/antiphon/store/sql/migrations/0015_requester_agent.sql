-- oldest: 8
-- The agent that sent a message from the session that all agents share, and answers the replies to it there.
-- NULL is the agent that the session belongs to.

ALTER TABLE exchanges ADD COLUMN requester_agent TEXT;
