-- name: position_of_run
-- The position of a running run of this session in its chain.
SELECT n, chain, hop FROM runs WHERE id = :run_id AND session = :session AND state = 'running';

-- name: count_run
INSERT INTO chains (id, runs, created_at) VALUES (:id, 1, :now)
ON CONFLICT (id) DO UPDATE SET runs = chains.runs + 1 RETURNING runs;

-- name: length
SELECT runs FROM chains WHERE id = :id;

-- name: active_waits
-- Sessions that this one is waiting for: both the waiting run and the awaited run are active.
SELECT w.target, s.key FROM waits w
JOIN runs r ON r.n = w.run AND r.state = 'running'
JOIN runs a ON a.id = w.awaited AND a.state IN ('queued', 'running')
JOIN sessions s ON s.id = w.target
WHERE w.session = :session AND w.until > :now LIMIT 100;

-- name: record_wait
INSERT INTO waits (run, session, awaited, target, until) VALUES (:run, :session, :awaited, :target, :until)
ON CONFLICT (run, awaited) DO UPDATE SET until = excluded.until;

-- name: delete_expired_waits
DELETE FROM waits WHERE until <= :now;
