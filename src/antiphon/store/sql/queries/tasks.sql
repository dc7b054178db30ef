-- name: insert
INSERT INTO tasks (id, digest, requester, requester_key, child, child_key, child_session_id, agent_id, signature, label,
                   task, phase, current, options, destination, chain, hop, created_at)
VALUES (:id, :digest, :requester, :requester_key, :child, :child_key, :child_session_id, :agent_id, :signature, :label,
        :task, 'running', :id, :options, :destination, :chain, :hop, :now)
RETURNING n;

-- name: by_id
SELECT * FROM tasks WHERE id = :id;

-- name: by_current_run
-- The task, if this is its current run.
SELECT * FROM tasks WHERE n = :n AND current = :run_id AND phase <> 'settled';

-- name: by_child
SELECT * FROM tasks WHERE child_key = :key ORDER BY n DESC LIMIT 1;

-- name: count_unsettled
SELECT count(*) AS under_way FROM (SELECT 1 FROM tasks WHERE requester = :requester AND phase <> 'settled' LIMIT 10000) t;

-- name: count_awaited
-- Unsettled tasks whose reports wake the requester.
SELECT count(*) AS awaited FROM
  (SELECT 1 FROM tasks WHERE requester = :requester AND phase <> 'settled' AND wakes = 1 LIMIT 10000) t;

-- name: stalled
-- Tasks that nothing will continue: their run has ended or is gone, and no task they wait for is unsettled.
SELECT t.* FROM tasks t LEFT JOIN runs r ON r.id = t.current
WHERE t.phase <> 'settled' AND (r.id IS NULL OR r.ended_at IS NOT NULL)
  AND NOT (t.phase = 'waiting' AND EXISTS
           (SELECT 1 FROM tasks c WHERE c.requester = t.child AND c.phase <> 'settled' AND c.wakes = 1))
ORDER BY t.n LIMIT 100;

-- name: last_report_during_run
-- The last report during a run, among the last thousand tasks of the requester.
SELECT t.chain, t.hop
FROM (SELECT n, settled_at, announced, chain, hop FROM tasks WHERE requester = :requester ORDER BY n DESC LIMIT 1000) t
JOIN runs r ON r.id = :run_id
WHERE t.settled_at >= r.started_at AND t.announced NOT IN ('none', 'skipped')
ORDER BY t.settled_at DESC LIMIT 1;

-- name: of_requester
-- Tasks of a session, newest first: unsettled ones, and those settled recently.
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

-- name: latest_with_signature
SELECT outcome, ended_at FROM tasks WHERE signature = :signature AND outcome IS NOT NULL ORDER BY n DESC LIMIT :limit;

-- name: sum_usage
-- The usage of all runs in the child session.
SELECT CAST(coalesce(sum(input + cache_read + cache_write), 0) AS BIGINT) AS input,
       CAST(coalesce(sum(output), 0) AS BIGINT) AS output,
       CASE WHEN count(*) = count(cost) THEN sum(cost) END AS cost
FROM usage WHERE session_key = :key;

-- name: latest_tool_result
SELECT m.body FROM messages m JOIN sessions s ON s.transcript = m.transcript
WHERE s.id = :child AND m.role = 'toolResult' ORDER BY m.seq DESC LIMIT 1;

-- name: record_outcome
-- The outcome of the child's work, independent of its announcement.
UPDATE tasks SET outcome = :outcome, error = :error, result = :result, result_source = :result_source, model = :model,
       started_at = (SELECT r.started_at FROM runs r WHERE r.id = tasks.id), ended_at = :now
WHERE n = :n;

-- name: advance
UPDATE tasks SET phase = :phase, current = :current WHERE n = :n;

-- name: replace_text
UPDATE tasks SET task = :task WHERE n = :n;

-- name: settle
UPDATE tasks SET phase = 'settled', announced = :announced, report = :report, settled_at = :now, archive_at = :archive_at
WHERE n = :n;

-- name: set_announced
-- The archive delay starts when the announcement has settled.
UPDATE tasks SET announced = :announced, archive_at = :archive_at WHERE n = :n;

-- name: overdue
-- Tasks past their deadline that wait for tasks of their own.
SELECT t.child, t.child_key FROM tasks t JOIN runs r ON r.id = t.id
WHERE t.phase = 'waiting' AND r.deadline_at <= :now LIMIT 100;

-- name: mute
-- Tasks that were stopped together with their requester do not wake it again.
UPDATE tasks SET wakes = 0 WHERE requester = :requester AND phase <> 'settled';

-- name: to_archive
SELECT t.n, t.child, t.child_key, t.child_session_id, t.agent_id, t.options FROM tasks t
WHERE t.archive_at <= :now AND t.archived_at IS NULL ORDER BY t.archive_at LIMIT :limit;

-- name: set_archived
UPDATE tasks SET archived_at = :now WHERE n = :n;

-- name: postpone_archive
UPDATE tasks SET archive_at = :later WHERE n = :n;

-- name: set_yield
UPDATE sessions SET yielded = :how, yield_run = :run_id WHERE id = :session;

-- name: set_yield_if_unset
-- For a turn that ended with unsettled tasks but without a yield.
UPDATE sessions SET yielded = 'all' WHERE id = :session AND yielded IS NULL;

-- name: run_deadline
SELECT deadline_at FROM runs WHERE id = :id;

-- name: by_n
SELECT * FROM tasks WHERE n = :n;

-- name: clear_texts
-- Clears the texts of a deleted child. The task and its outcome stay.
UPDATE tasks SET task = '', result = NULL, report = NULL WHERE child_key = :key AND child = :child;
