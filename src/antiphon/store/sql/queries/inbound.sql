-- name: find_event
SELECT state, outcome, attempts, run_id, session_key FROM inbound_events
WHERE channel = :channel AND account = :account AND event_id = :event_id;

-- name: record_event
-- One row per event: a repetition changes nothing, an event that failed before is decided after all.
INSERT INTO inbound_events (channel, account, event_id, state, outcome, reason, run_id, session_key, received_at, expires_at)
VALUES (:channel, :account, :event_id, 'decided', :outcome, :reason, :run_id, :session_key, :now, :expires_at)
ON CONFLICT (channel, account, event_id) DO UPDATE
  SET state = 'decided', outcome = excluded.outcome, reason = excluded.reason, run_id = excluded.run_id,
      session_key = excluded.session_key
  WHERE inbound_events.state = 'failing';

-- name: record_failure
INSERT INTO inbound_events (channel, account, event_id, state, reason, attempts, received_at, expires_at)
VALUES (:channel, :account, :event_id, 'failing', :reason, 1, :now, :expires_at)
ON CONFLICT (channel, account, event_id) DO UPDATE
  SET attempts = inbound_events.attempts + 1, reason = excluded.reason
  WHERE inbound_events.state = 'failing'
RETURNING attempts;

-- name: give_up_event
UPDATE inbound_events SET state = 'dead'
WHERE channel = :channel AND account = :account AND event_id = :event_id AND state = 'failing';

-- name: count_dead
SELECT channel, account, count(*) AS events FROM inbound_events WHERE state = 'dead' GROUP BY channel, account;

-- name: delete_old_events
DELETE FROM inbound_events WHERE expires_at <= :now;

-- name: add_context
INSERT INTO group_context (place, sender, text, sent_at) VALUES (:place, :sender, :text, :sent_at);

-- name: trim_context
DELETE FROM group_context WHERE place = :place AND n <= coalesce(
  (SELECT n FROM group_context WHERE place = :place ORDER BY n DESC LIMIT 1 OFFSET :kept), 0);

-- name: context
SELECT sender, text, sent_at FROM group_context WHERE place = :place ORDER BY n LIMIT 1000;

-- name: clear_context
DELETE FROM group_context WHERE place = :place;

-- name: delete_old_context
DELETE FROM group_context WHERE sent_at <= :before;

-- name: acquire_receiver
INSERT INTO channel_accounts (channel, account, receiver, lease_until) VALUES (:channel, :account, :owner, :until)
ON CONFLICT (channel, account) DO UPDATE SET receiver = excluded.receiver, lease_until = excluded.lease_until
  WHERE channel_accounts.receiver = :owner OR channel_accounts.lease_until <= :now;

-- name: release_receiver
UPDATE channel_accounts SET lease_until = 0 WHERE channel = :channel AND account = :account AND receiver = :owner;

-- name: set_route
-- Where a session was last written to from, for announces and deliveries without an address of their own.
UPDATE sessions SET last_channel = :channel, last_to = :to, last_account = :account, last_thread = :thread WHERE id = :id;
