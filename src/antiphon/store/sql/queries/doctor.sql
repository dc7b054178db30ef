-- name: entries_before
SELECT m.id, m.seq, m.body, t.key, t.session_id FROM messages m JOIN transcripts t ON t.id = m.transcript
WHERE m.id < :before ORDER BY m.id DESC LIMIT :limit;

-- name: runs_without_owner
SELECT r.id, s.key FROM runs r JOIN sessions s ON s.id = r.session LEFT JOIN owners o ON o.id = r.owner
WHERE r.state = 'running' AND coalesce(o.lease_until, 0) <= :now ORDER BY r.n LIMIT 100;

-- name: interrupted_runs
SELECT r.id, s.key, r.error, r.attempts, r.ended_at FROM runs r JOIN sessions s ON s.id = r.session
WHERE r.state = 'interrupted' ORDER BY r.n DESC LIMIT 50;
