-- name: insert
INSERT INTO exchanges (id, requester, requester_key, requester_channel, target, target_key, target_channel, message,
                       phase, current, turns, announce, destination, chain, hop, requester_agent, created_at)
VALUES (:id, :requester, :requester_key, :requester_channel, :target, :target_key, :target_channel, :message,
        'primary', :id, :turns, :announce, :destination, :chain, :hop, :requester_agent, :now)
ON CONFLICT (id) DO NOTHING RETURNING n;

-- name: answered
UPDATE exchanges SET answered_by = :run_id WHERE n = :n;

-- name: at
-- The exchange, if it is this run that it is in.
SELECT * FROM exchanges WHERE n = :n AND current = :run_id AND phase <> 'settled';

-- name: by_id
SELECT * FROM exchanges WHERE id = :id;

-- name: begins_with
-- The ids that begin like this, among the latest exchanges.
SELECT id FROM (SELECT id, n FROM exchanges ORDER BY n DESC LIMIT :recent) latest
WHERE substr(id, 1, :length) = :prefix ORDER BY n DESC LIMIT :limit;

-- name: step
UPDATE exchanges SET phase = :phase, current = :current, turn = :turn,
       first_reply = coalesce(first_reply, :reply), latest_reply = coalesce(:reply, latest_reply)
WHERE n = :n;

-- name: settle
UPDATE exchanges SET phase = 'settled', announced = :announced, settled_at = :now,
       first_reply = coalesce(first_reply, :reply), latest_reply = coalesce(:reply, latest_reply)
WHERE n = :n;

-- name: hand_on
-- Another run answers instead of this one.
UPDATE exchanges SET current = :next WHERE n = :n AND current = :run_id AND phase <> 'settled';

-- name: astray
-- Nothing will move these on any more: their run has ended or is gone, and does not wait in a session to be woken.
SELECT e.* FROM exchanges e LEFT JOIN runs r ON r.id = e.current
WHERE e.settled_at IS NULL AND (r.id IS NULL OR r.ended_at IS NOT NULL)
  AND NOT EXISTS (SELECT 1 FROM sessions s WHERE s.id = r.session AND s.yielded IS NOT NULL
                    AND (r.woken_by = '' OR s.yield_run = r.id))
ORDER BY e.n LIMIT 100;

-- name: announced
UPDATE exchanges SET announced = :announced WHERE n = :n;

-- name: forget_words
-- What was said to a session that is forgotten, and by it. That it was, and how it ended, stays.
UPDATE exchanges SET message = '', first_reply = NULL, latest_reply = NULL
WHERE (target = :session OR requester = :session) AND settled_at IS NOT NULL;

-- name: page
-- The newest first, with the beginning of what was said.
SELECT e.n, e.id, e.requester_key, e.target_key, e.phase, e.current, e.turn, e.turns, e.announced, e.chain, e.hop,
       e.created_at, e.settled_at, substr(e.message, 1, :chars) AS message,
       substr(e.latest_reply, 1, :chars) AS latest_reply
FROM exchanges e WHERE e.n < :before ORDER BY e.n DESC LIMIT :limit;

-- name: page_unsettled
SELECT e.n, e.id, e.requester_key, e.target_key, e.phase, e.current, e.turn, e.turns, e.announced, e.chain, e.hop,
       e.created_at, e.settled_at, substr(e.message, 1, :chars) AS message,
       substr(e.latest_reply, 1, :chars) AS latest_reply
FROM exchanges e WHERE e.settled_at IS NULL AND e.n < :before ORDER BY e.n DESC LIMIT :limit;

-- name: page_of
-- Of one session, as either side: no more of each than the page can hold.
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

-- name: page_of_unsettled
-- Looked for among all that is under way, which is little: a session may have had very many that are over.
SELECT e.n, e.id, e.requester_key, e.target_key, e.phase, e.current, e.turn, e.turns, e.announced, e.chain, e.hop,
       e.created_at, e.settled_at, substr(e.message, 1, :chars) AS message,
       substr(e.latest_reply, 1, :chars) AS latest_reply
FROM exchanges e WHERE e.settled_at IS NULL AND :session IN (e.target, e.requester) AND e.n < :before
ORDER BY e.n DESC LIMIT :limit;
