-- name: insert
INSERT INTO deliveries (key, kind, session, session_key, destination, place, body, stats, entry_run, exchange, task,
                        next_at, created_at, expires_at)
VALUES (:key, :kind, :session, :session_key, :destination, :place, :body, :stats, :entry_run, :exchange, :task,
        :now, :now, :expires_at)
ON CONFLICT (key) DO NOTHING;

-- name: due
-- The first delivery of each place. In a web chat it waits until the run that writes its text to the transcript has ended.
SELECT d.* FROM deliveries d
WHERE d.state = 'pending' AND d.next_at <= :now AND d.n > :after
  AND NOT EXISTS (SELECT 1 FROM deliveries o WHERE o.place = d.place AND o.n < d.n AND o.state IN ('pending', 'sending'))
  AND (d.entry_run IS NULL OR d.place NOT LIKE 'webchat|%' OR NOT EXISTS
       (SELECT 1 FROM runs r WHERE r.id = d.entry_run AND r.state IN ('queued', 'running')))
ORDER BY d.n LIMIT :limit;

-- name: next_at
SELECT min(next_at) AS next_at FROM deliveries WHERE state = 'pending' AND next_at > :now;

-- name: expired
-- Deliveries to services that are too old to be sent; those of earlier versions have no time of their own.
SELECT * FROM deliveries
WHERE state = 'pending' AND coalesce(expires_at, created_at + :lifetime) <= :now AND place NOT LIKE 'webchat|%'
ORDER BY n LIMIT 500;

-- name: claim
UPDATE deliveries SET state = 'sending', attempts = attempts + 1, owner = :owner
WHERE n = :n AND state = 'pending' AND attempts = :attempts;

-- name: settle
-- `attempts` is the number that this attempt has counted, `spent` the number that remains. A number comes again
-- after a wait that is no attempt, so the owner must be the same, too.
UPDATE deliveries SET state = :state, error = :error, message_id = coalesce(message_id, :message_id), next_at = :next_at,
       attempts = :spent, doubtful = CASE WHEN :doubtful = 1 THEN 1 ELSE doubtful END,
       settled_at = CASE WHEN :state = 'pending' THEN NULL ELSE CAST(:now AS BIGINT) END
WHERE n = :n AND state IN ('pending', 'sending') AND attempts = :attempts
  AND coalesce(owner, '') = :owner;

-- name: resolve
-- Decides an ambiguous delivery after all.
UPDATE deliveries SET state = :state, error = NULL, doubtful = 0, message_id = coalesce(message_id, :message_id), next_at = :now,
       settled_at = CASE WHEN :state = 'pending' THEN NULL ELSE CAST(:now AS BIGINT) END
WHERE n = :n AND state = 'ambiguous';

-- name: move
-- Gives waiting deliveries of a place the new address of their chat.
UPDATE deliveries SET destination = :destination, place = :new_place WHERE place = :place AND state IN ('pending', 'sending');

-- name: mark_shown
-- Whether people see the entry of an announce or note run.
UPDATE runs SET shown = CAST(:shown AS INTEGER) WHERE id = :run_id AND origin IN ('announce', 'note');

-- name: unresolved_sends
-- Deliveries whose sender is gone, so that it is unknown whether they were sent, and the caller's own.
SELECT d.* FROM deliveries d LEFT JOIN owners o ON o.id = d.owner
WHERE d.state = 'sending' AND (d.owner = :owner OR coalesce(o.lease_until, 0) <= :now) ORDER BY d.n LIMIT 500;

-- name: by_key
SELECT d.*, (SELECT count(*) FROM delivery_parts p WHERE p.delivery = d.n) AS parts,
       (SELECT count(*) FROM delivery_parts p WHERE p.delivery = d.n AND p.sent_at IS NOT NULL) AS parts_sent
FROM deliveries d WHERE d.key = :key;

-- name: requeue
UPDATE deliveries SET state = 'pending', attempts = 0, doubtful = 0, next_at = :now, settled_at = NULL, error = NULL,
       expires_at = :expires_at
WHERE n = :n AND state IN ('dead', 'ambiguous', 'blocked', 'expired');

-- name: page
SELECT d.*, (SELECT count(*) FROM delivery_parts p WHERE p.delivery = d.n) AS parts,
       (SELECT count(*) FROM delivery_parts p WHERE p.delivery = d.n AND p.sent_at IS NOT NULL) AS parts_sent
FROM deliveries d WHERE d.n < :before ORDER BY d.n DESC LIMIT :limit;

-- name: page_by_state
SELECT d.*, (SELECT count(*) FROM delivery_parts p WHERE p.delivery = d.n) AS parts,
       (SELECT count(*) FROM delivery_parts p WHERE p.delivery = d.n AND p.sent_at IS NOT NULL) AS parts_sent
FROM deliveries d WHERE d.state = :state AND d.n < :before ORDER BY d.n DESC LIMIT :limit;

-- name: count_by_state
-- Delivered ones, usually the great majority, are counted only up to `most`.
SELECT state, count(*) AS deliveries FROM deliveries WHERE state <> 'delivered' GROUP BY state
UNION ALL
SELECT 'delivered', count(*) FROM (SELECT 1 FROM deliveries WHERE state = 'delivered' LIMIT :most) d HAVING count(*) > 0;

-- name: clear_texts
-- Clears the settled deliveries of a deleted session. An empty one that is sent again is blocked.
UPDATE deliveries SET body = '', stats = NULL WHERE session = :session AND settled_at IS NOT NULL;

-- name: clear_part_texts
UPDATE delivery_parts SET text = '', plain = NULL
WHERE delivery IN (SELECT n FROM deliveries WHERE session = :session AND settled_at IS NOT NULL);

-- name: insert_part
INSERT INTO delivery_parts (delivery, n, text, plain) VALUES (:delivery, :n, :text, :plain);

-- name: unsent_parts
SELECT * FROM delivery_parts WHERE delivery = :delivery AND sent_at IS NULL ORDER BY n;

-- name: count_parts
SELECT count(*) AS parts FROM delivery_parts WHERE delivery = :delivery;

-- name: start_part
UPDATE delivery_parts SET started_at = coalesce(started_at, :now) WHERE delivery = :delivery AND n = :n;

-- name: restart_parts
-- Nothing of the unsent parts can have arrived, so their windows begin anew.
UPDATE delivery_parts SET started_at = NULL WHERE delivery = :delivery AND sent_at IS NULL;

-- name: record_part
UPDATE delivery_parts SET message_id = :message_id, sent_at = :now WHERE delivery = :delivery AND n = :n AND sent_at IS NULL;

-- name: confirm_sending
-- A row if this attempt still owns the delivery; the part that was in doubt has arrived.
UPDATE deliveries SET doubtful = 0, message_id = coalesce(message_id, :message_id)
WHERE n = :n AND state = 'sending' AND owner = :owner AND attempts = :attempts;

-- name: delete_parts_if_none_sent
-- They are rendered again when the delivery is sent again.
DELETE FROM delivery_parts WHERE delivery = :delivery
  AND NOT EXISTS (SELECT 1 FROM delivery_parts p WHERE p.delivery = :delivery AND p.sent_at IS NOT NULL);

-- name: hold
INSERT INTO channel_holds (account, until) VALUES (:account, :until)
ON CONFLICT (account) DO UPDATE SET until = excluded.until WHERE channel_holds.until < excluded.until;

-- name: holds
SELECT account, until FROM channel_holds WHERE until > :now;

-- name: delete_old_holds
DELETE FROM channel_holds WHERE until <= :now;
