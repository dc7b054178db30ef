-- name: insert
INSERT INTO exchanges (id, requester, requester_key, requester_channel, target, target_key, target_channel, message,
                       phase, current, turns, announce, destination, chain, hop, created_at)
VALUES (:id, :requester, :requester_key, :requester_channel, :target, :target_key, :target_channel, :message,
        'primary', :id, :turns, :announce, :destination, :chain, :hop, :now)
ON CONFLICT (id) DO NOTHING RETURNING n;

-- name: at
-- The exchange, if it is this run that it is in.
SELECT * FROM exchanges WHERE n = :n AND current = :run_id AND phase <> 'settled';

-- name: by_id
SELECT * FROM exchanges WHERE id = :id;

-- name: step
UPDATE exchanges SET phase = :phase, current = :current, turn = :turn,
       first_reply = coalesce(first_reply, :reply), latest_reply = coalesce(:reply, latest_reply)
WHERE n = :n;

-- name: settle
UPDATE exchanges SET phase = 'settled', announced = :announced, settled_at = :now,
       first_reply = coalesce(first_reply, :reply), latest_reply = coalesce(:reply, latest_reply)
WHERE n = :n;

-- name: announced
UPDATE exchanges SET announced = :announced WHERE n = :n;
