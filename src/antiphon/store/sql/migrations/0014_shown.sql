-- oldest: 8
-- Whether people were shown what a run put into a transcript: 1 posted, 0 kept from them, null where that is not asked.
-- Of announcements before this only those that are known to be blocked, or on their way, count as not shown.

ALTER TABLE runs ADD COLUMN shown INTEGER;
UPDATE runs SET shown = 1
WHERE origin = 'announce' AND exchange IS NOT NULL AND state = 'ok'
  AND NOT EXISTS (SELECT 1 FROM deliveries d WHERE d.session = runs.session AND d.entry_run = runs.id
                  AND d.state IN ('blocked', 'pending', 'sending'));
UPDATE runs SET shown = 0
WHERE origin = 'note' AND id IN (SELECT entry_run FROM deliveries WHERE state = 'blocked' AND entry_run IS NOT NULL);
