-- name: insert
INSERT INTO deliveries (key, kind, session, session_key, destination, place, body, stats, entry_run, exchange, task,
                        next_at, created_at)
VALUES (:key, :kind, :session, :session_key, :destination, :place, :body, :stats, :entry_run, :exchange, :task,
        :now, :now)
ON CONFLICT (key) DO NOTHING;

-- name: due
-- The first of each place; one whose words are still on their way into the transcript waits for that.
SELECT d.* FROM deliveries d
WHERE d.state = 'pending' AND d.next_at <= :now
  AND NOT EXISTS (SELECT 1 FROM deliveries o WHERE o.place = d.place AND o.n < d.n AND o.state IN ('pending', 'sending'))
  AND (d.entry_run IS NULL OR NOT EXISTS
       (SELECT 1 FROM runs r WHERE r.id = d.entry_run AND r.state IN ('queued', 'running')))
ORDER BY d.n LIMIT :limit;

-- name: next_at
SELECT min(next_at) AS next_at FROM deliveries WHERE state = 'pending' AND next_at > :now;

-- name: claim
UPDATE deliveries SET state = 'sending', attempts = attempts + 1, owner = :owner WHERE n = :n AND state = 'pending';

-- name: settle
UPDATE deliveries SET state = :state, error = :error, message_id = :message_id, next_at = :next_at,
       settled_at = CASE WHEN :state = 'pending' THEN NULL ELSE :now END
WHERE n = :n AND state IN ('pending', 'sending');

-- name: left_sending
-- Of owners that are gone: nobody knows whether they were sent.
SELECT d.* FROM deliveries d LEFT JOIN owners o ON o.id = d.owner
WHERE d.state = 'sending' AND coalesce(o.lease_until, 0) <= :now ORDER BY d.n LIMIT 500;

-- name: by_key
SELECT * FROM deliveries WHERE key = :key;

-- name: again
UPDATE deliveries SET state = 'pending', attempts = 0, next_at = :now, settled_at = NULL, error = NULL
WHERE n = :n AND state IN ('dead', 'ambiguous', 'blocked');

-- name: page
SELECT * FROM deliveries WHERE n < :before AND (:state IS NULL OR state = :state) ORDER BY n DESC LIMIT :limit;

-- name: standing
SELECT state, count(*) AS deliveries FROM deliveries GROUP BY state;
