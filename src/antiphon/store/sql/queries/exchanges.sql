-- name: insert
INSERT INTO exchanges (id, requester, requester_key, requester_channel, target, target_key, target_channel, message,
                       phase, current, turns, announce, destination, chain, hop, requester_agent, created_at)
VALUES (:id, :requester, :requester_key, :requester_channel, :target, :target_key, :target_channel, :message,
        'primary', :id, :turns, :announce, :destination, :chain, :hop, :requester_agent, :now)
ON CONFLICT (id) DO NOTHING RETURNING n;

-- name: set_answering_run
UPDATE exchanges SET answered_by = :run_id WHERE n = :n;

-- name: by_current_run
-- The exchange, if this is its current run.
SELECT * FROM exchanges WHERE n = :n AND current = :run_id AND phase <> 'settled';

-- name: by_id
SELECT * FROM exchanges WHERE id = :id;

-- name: ids_with_prefix
-- Ids with this prefix among the latest exchanges.
SELECT id FROM (SELECT id, n FROM exchanges ORDER BY n DESC LIMIT :recent) latest
WHERE substr(id, 1, :length) = :prefix ORDER BY n DESC LIMIT :limit;

-- name: advance
UPDATE exchanges SET phase = :phase, current = :current, turn = :turn,
       first_reply = coalesce(first_reply, :reply), latest_reply = coalesce(:reply, latest_reply)
WHERE n = :n;

-- name: settle
UPDATE exchanges SET phase = 'settled', announced = :announced, settled_at = :now,
       first_reply = coalesce(first_reply, :reply), latest_reply = coalesce(:reply, latest_reply)
WHERE n = :n;

-- name: set_current_run
-- Another run answers instead of this one.
UPDATE exchanges SET current = :next WHERE n = :n AND current = :run_id AND phase <> 'settled';

-- name: stalled
-- Exchanges that nothing will continue: their run has ended or is gone, and does not wait in a session for a wake.
SELECT e.* FROM exchanges e LEFT JOIN runs r ON r.id = e.current
WHERE e.settled_at IS NULL AND (r.id IS NULL OR r.ended_at IS NOT NULL)
  AND NOT EXISTS (SELECT 1 FROM sessions s WHERE s.id = r.session AND s.yielded IS NOT NULL
                    AND (r.woken_by = '' OR s.yield_run = r.id))
ORDER BY e.n LIMIT 100;

-- name: set_announced
UPDATE exchanges SET announced = :announced WHERE n = :n;

-- name: clear_texts
-- Clears the texts sent to and by a deleted session. The exchange and its outcome stay.
UPDATE exchanges SET message = '', first_reply = NULL, latest_reply = NULL
WHERE (target = :session OR requester = :session) AND settled_at IS NOT NULL;

-- name: page
-- Newest first, with the beginning of each text.
SELECT e.n, e.id, e.requester_key, e.target_key, e.phase, e.current, e.turn, e.turns, e.announced, e.chain, e.hop,
       e.created_at, e.settled_at, substr(e.message, 1, :chars) AS message,
       substr(e.latest_reply, 1, :chars) AS latest_reply
FROM exchanges e WHERE e.n < :before ORDER BY e.n DESC LIMIT :limit;

-- name: page_unsettled
SELECT e.n, e.id, e.requester_key, e.target_key, e.phase, e.current, e.turn, e.turns, e.announced, e.chain, e.hop,
       e.created_at, e.settled_at, substr(e.message, 1, :chars) AS message,
       substr(e.latest_reply, 1, :chars) AS latest_reply
FROM exchanges e WHERE e.settled_at IS NULL AND e.n < :before ORDER BY e.n DESC LIMIT :limit;

-- name: page_of_session
-- Exchanges of one session on either side; each side reads at most one page.
SELECT e.n, e.id, e.requester_key, e.target_key, e.phase, e.current, e.turn, e.turns, e.announced, e.chain, e.hop,
       e.created_at, e.settled_at, substr(e.message, 1, :chars) AS message,
       substr(e.latest_reply, 1, :chars) AS latest_reply
FROM (SELECT n FROM (SELECT n FROM exchanges WHERE target = :session AND n < :before
                     ORDER BY n DESC LIMIT :limit) asked
      UNION
      SELECT n FROM (SELECT n FROM exchanges WHERE requester = :session AND n < :before
                     ORDER BY n DESC LIMIT :limit) asking) found
JOIN exchanges e ON e.n = found.n
ORDER BY e.n DESC LIMIT :limit;

-- name: page_of_session_unsettled
-- Reads all unsettled exchanges, which are few; a session may have very many settled ones.
SELECT e.n, e.id, e.requester_key, e.target_key, e.phase, e.current, e.turn, e.turns, e.announced, e.chain, e.hop,
       e.created_at, e.settled_at, substr(e.message, 1, :chars) AS message,
       substr(e.latest_reply, 1, :chars) AS latest_reply
FROM exchanges e WHERE e.settled_at IS NULL AND :session IN (e.target, e.requester) AND e.n < :before
ORDER BY e.n DESC LIMIT :limit;
