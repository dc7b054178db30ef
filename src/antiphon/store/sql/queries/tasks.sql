-- name: insert
INSERT INTO tasks (id, digest, requester, requester_key, child, child_key, child_session_id, agent_id, signature, label,
                   task, phase, current, options, destination, chain, hop, created_at)
VALUES (:id, :digest, :requester, :requester_key, :child, :child_key, :child_session_id, :agent_id, :signature, :label,
        :task, 'running', :id, :options, :destination, :chain, :hop, :now)
RETURNING n;

-- name: by_id
SELECT * FROM tasks WHERE id = :id;

-- name: at
-- The task, if it is this run that it is in.
SELECT * FROM tasks WHERE n = :n AND current = :run_id AND phase <> 'settled';

-- name: by_child
SELECT * FROM tasks WHERE child_key = :key ORDER BY n DESC LIMIT 1;

-- name: under_way
SELECT count(*) AS under_way FROM (SELECT 1 FROM tasks WHERE requester = :requester AND phase <> 'settled' LIMIT 10000) t;

-- name: awaited
-- Those at work whose reports somebody can be woken for.
SELECT count(*) AS awaited FROM
  (SELECT 1 FROM tasks WHERE requester = :requester AND phase <> 'settled' AND wakes = 1 LIMIT 10000) t;

-- name: astray
-- Nothing will move these on any more: their run has ended or is gone, and nothing they wait for is at work.
SELECT t.* FROM tasks t LEFT JOIN runs r ON r.id = t.current
WHERE t.phase <> 'settled' AND (r.id IS NULL OR r.ended_at IS NOT NULL)
  AND NOT (t.phase = 'waiting' AND EXISTS
           (SELECT 1 FROM tasks c WHERE c.requester = t.child AND c.phase <> 'settled' AND c.wakes = 1))
ORDER BY t.n LIMIT 100;

-- name: reported_during
-- The last of them, among the last thousand that were spawned.
SELECT t.chain, t.hop
FROM (SELECT n, settled_at, announced, chain, hop FROM tasks WHERE requester = :requester ORDER BY n DESC LIMIT 1000) t
JOIN runs r ON r.id = :run_id
WHERE t.settled_at >= r.started_at AND t.announced NOT IN ('none', 'skipped')
ORDER BY t.settled_at DESC LIMIT 1;

-- name: of
-- What a session has spawned, the newest first: what is at work, and of the last so many what has ended lately.
SELECT t.id, t.child_key, t.agent_id, t.label, t.phase, t.outcome, t.announced, t.model, t.created_at, t.started_at,
       t.ended_at, substr(t.task, 1, :chars) AS task, substr(t.result, 1, :chars) AS result,
       substr(t.error, 1, :chars) AS error, s.total_tokens, s.updated_at AS child_updated_at
FROM (SELECT n FROM (SELECT n FROM tasks WHERE requester = :requester AND phase <> 'settled'
                     ORDER BY n DESC LIMIT :limit) at_work
      UNION
      SELECT n FROM (SELECT n, settled_at FROM tasks WHERE requester = :requester ORDER BY n DESC LIMIT :limit) lately
      WHERE settled_at >= :since) found
JOIN tasks t ON t.n = found.n LEFT JOIN sessions s ON s.id = t.child
ORDER BY t.n DESC;

-- name: latest_alike
SELECT outcome, ended_at FROM tasks WHERE signature = :signature AND outcome IS NOT NULL ORDER BY n DESC LIMIT :limit;

-- name: spent
-- By everything that ran in the child, whichever runs those were.
SELECT CAST(coalesce(sum(input + cache_read + cache_write), 0) AS BIGINT) AS input,
       CAST(coalesce(sum(output), 0) AS BIGINT) AS output,
       CASE WHEN count(*) = count(cost) THEN sum(cost) END AS cost
FROM usage WHERE session_key = :key;

-- name: latest_tool_result
SELECT m.body FROM messages m JOIN sessions s ON s.transcript = m.transcript
WHERE s.id = :child AND m.role = 'toolResult' ORDER BY m.seq DESC LIMIT 1;

-- name: ended
-- What the child's work came to, whatever becomes of the announcement.
UPDATE tasks SET outcome = :outcome, error = :error, result = :result, result_source = :result_source, model = :model,
       started_at = (SELECT r.started_at FROM runs r WHERE r.id = tasks.id), ended_at = :now
WHERE n = :n;

-- name: step
UPDATE tasks SET phase = :phase, current = :current WHERE n = :n;

-- name: settle
UPDATE tasks SET phase = 'settled', announced = :announced, report = :report, settled_at = :now, archive_at = :archive_at
WHERE n = :n;

-- name: announced
-- The archive clock starts when the announcement has settled.
UPDATE tasks SET announced = :announced, archive_at = :archive_at WHERE n = :n;

-- name: overdue
-- Those that wait for what they spawned, and have had all their time.
SELECT t.child, t.child_key FROM tasks t JOIN runs r ON r.id = t.id
WHERE t.phase = 'waiting' AND r.deadline_at <= :now LIMIT 100;

-- name: hush
-- What was stopped together with whoever asked for it does not wake them again.
UPDATE tasks SET wakes = 0 WHERE requester = :requester AND phase <> 'settled';

-- name: to_archive
SELECT t.n, t.child, t.child_key, t.agent_id, t.options FROM tasks t
WHERE t.archive_at <= :now AND t.archived_at IS NULL ORDER BY t.archive_at LIMIT :limit;

-- name: archived
UPDATE tasks SET archived_at = :now WHERE n = :n;

-- name: postpone_archive
UPDATE tasks SET archive_at = :later WHERE n = :n;

-- name: yield_to
UPDATE sessions SET yielded = :how, yield_run = :run_id WHERE id = :session;

-- name: yield_unless_yielded
-- It has ended its turn without a word that it waits.
UPDATE sessions SET yielded = 'all' WHERE id = :session AND yielded IS NULL;

-- name: deadline
SELECT deadline_at FROM runs WHERE id = :id;

-- name: by_n
SELECT * FROM tasks WHERE n = :n;

-- name: forget_words
-- What a child that is forgotten was to do, and what it said. That it did, and how it ended, stays.
UPDATE tasks SET task = '', result = NULL, report = NULL WHERE child_key = :key AND child = :child;
