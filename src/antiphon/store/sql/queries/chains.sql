-- name: of_run
-- Where a run stands in its chain, if it is this session's and under way.
SELECT n, chain, hop FROM runs WHERE id = :run_id AND session = :session AND state = 'running';

-- name: count
INSERT INTO chains (id, runs, created_at) VALUES (:id, 1, :now)
ON CONFLICT (id) DO UPDATE SET runs = chains.runs + 1 RETURNING runs;

-- name: length
SELECT runs FROM chains WHERE id = :id;

-- name: waits_of
-- The sessions that this one is waiting for right now: its run is under way, and so is what it waits for.
SELECT w.target, s.key FROM waits w
JOIN runs r ON r.n = w.run AND r.state = 'running'
JOIN runs a ON a.id = w.awaited AND a.state IN ('queued', 'running')
JOIN sessions s ON s.id = w.target
WHERE w.session = :session AND w.until > :now LIMIT 100;

-- name: wait
INSERT INTO waits (run, session, awaited, target, until) VALUES (:run, :session, :awaited, :target, :until)
ON CONFLICT (run, awaited) DO UPDATE SET until = excluded.until;

-- name: forget_waits
-- They have been void for some time.
DELETE FROM waits WHERE until <= :now;
