-- name: insert
INSERT INTO deliveries (key, kind, session, session_key, destination, place, body, stats, entry_run, exchange, task,
                        next_at, created_at)
VALUES (:key, :kind, :session, :session_key, :destination, :place, :body, :stats, :entry_run, :exchange, :task,
        :now, :now)
ON CONFLICT (key) DO NOTHING;

-- name: due
-- The first delivery of each place. In a web chat it waits until the run that writes its text to the transcript has ended.
SELECT d.* FROM deliveries d
WHERE d.state = 'pending' AND d.next_at <= :now
  AND NOT EXISTS (SELECT 1 FROM deliveries o WHERE o.place = d.place AND o.n < d.n AND o.state IN ('pending', 'sending'))
  AND (d.entry_run IS NULL OR d.place NOT LIKE 'webchat|%' OR NOT EXISTS
       (SELECT 1 FROM runs r WHERE r.id = d.entry_run AND r.state IN ('queued', 'running')))
ORDER BY d.n LIMIT :limit;

-- name: next_at
SELECT min(next_at) AS next_at FROM deliveries WHERE state = 'pending' AND next_at > :now;

-- name: claim
UPDATE deliveries SET state = 'sending', attempts = attempts + 1, owner = :owner
WHERE n = :n AND state = 'pending' AND attempts = :attempts;

-- name: settle
UPDATE deliveries SET state = :state, error = :error, message_id = :message_id, next_at = :next_at,
       doubtful = CASE WHEN :doubtful = 1 THEN 1 ELSE doubtful END,
       settled_at = CASE WHEN :state = 'pending' THEN NULL ELSE CAST(:now AS BIGINT) END
WHERE n = :n AND state IN ('pending', 'sending') AND attempts = :attempts;

-- name: mark_shown
-- Whether people see the entry of an announce or note run.
UPDATE runs SET shown = CAST(:shown AS INTEGER) WHERE id = :run_id AND origin IN ('announce', 'note');

-- name: unresolved_sends
-- Deliveries whose sender is gone, so that it is unknown whether they were sent, and the caller's own.
SELECT d.* FROM deliveries d LEFT JOIN owners o ON o.id = d.owner
WHERE d.state = 'sending' AND (d.owner = :owner OR coalesce(o.lease_until, 0) <= :now) ORDER BY d.n LIMIT 500;

-- name: by_key
SELECT * FROM deliveries WHERE key = :key;

-- name: requeue
UPDATE deliveries SET state = 'pending', attempts = 0, doubtful = 0, next_at = :now, settled_at = NULL, error = NULL
WHERE n = :n AND state IN ('dead', 'ambiguous', 'blocked');

-- name: page
SELECT * FROM deliveries WHERE n < :before ORDER BY n DESC LIMIT :limit;

-- name: page_by_state
SELECT * FROM deliveries WHERE state = :state AND n < :before ORDER BY n DESC LIMIT :limit;

-- name: count_by_state
-- Delivered ones, usually the great majority, are counted only up to `most`.
SELECT state, count(*) AS deliveries FROM deliveries WHERE state <> 'delivered' GROUP BY state
UNION ALL
SELECT 'delivered', count(*) FROM (SELECT 1 FROM deliveries WHERE state = 'delivered' LIMIT :most) d HAVING count(*) > 0;

-- name: clear_texts
-- Clears the settled deliveries of a deleted session. An empty one that is sent again is blocked.
UPDATE deliveries SET body = '', stats = NULL WHERE session = :session AND settled_at IS NOT NULL;
