-- oldest: 8
-- Several runs of a session may have ended their turn to wait for sub-agents. One column of the session named only the
-- last of them; now each says it itself: '' while it waits, then the id of the run that answers for it.
ALTER TABLE runs ADD COLUMN woken_by TEXT;
CREATE INDEX runs_woken ON runs (woken_by, session) WHERE woken_by IS NOT NULL;
UPDATE runs SET woken_by = '' WHERE id IN (SELECT yield_run FROM sessions WHERE yield_run IS NOT NULL);
