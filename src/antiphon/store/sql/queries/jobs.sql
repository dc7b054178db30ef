-- name: insert
INSERT INTO jobs (id, name, enabled, agent_id, schedule, session_target, payload, delivery, delete_after_run,
                  created_at, updated_at, next_at)
VALUES (:id, :name, :enabled, :agent_id, :schedule, :session_target, :payload, :delivery, :delete_after_run,
        :now, :now, :next_at);

-- name: update
UPDATE jobs SET name = :name, enabled = :enabled, agent_id = :agent_id, schedule = :schedule,
       session_target = :session_target, payload = :payload, delivery = :delivery,
       delete_after_run = :delete_after_run, updated_at = :now, next_at = :next_at
WHERE id = :id;

-- name: remove
DELETE FROM jobs WHERE id = :id;

-- name: by_id
SELECT j.*, r.state AS run_state, r.error AS run_error
FROM jobs j LEFT JOIN runs r ON r.id = j.last_run_id WHERE j.id = :id;

-- name: other_with_name
SELECT id FROM jobs WHERE name = :name AND id <> :id ORDER BY n LIMIT 1;

-- name: list_all
SELECT j.*, r.state AS run_state, r.error AS run_error
FROM jobs j LEFT JOIN runs r ON r.id = j.last_run_id
WHERE j.enabled = 1 OR :disabled = 1 ORDER BY j.n LIMIT 1000;

-- name: overview
SELECT count(*) AS jobs, min(next_at) AS next_at FROM jobs;

-- name: count_of_agent
SELECT count(*) AS jobs FROM jobs WHERE agent_id = :agent_id;

-- name: due
SELECT id FROM jobs WHERE next_at <= :now ORDER BY next_at, n LIMIT 1000;

-- name: record_firing
-- `updated_at` stays: it is when the job itself was last changed.
UPDATE jobs SET enabled = :enabled, next_at = :next_at, last_at = :now, last_slot = coalesce(:slot, last_slot),
       last_run_id = :run_id, last_status = :status, last_error = :error,
       firings = firings + 1, failures = failures + :failed
WHERE id = :id;

-- name: count_unfinished_runs
SELECT count(*) AS runs FROM runs WHERE origin = 'cron' AND ended_at IS NULL;

-- name: runs_between
-- The ids of a job's runs begin with the job's id, so they are a range; newest first.
SELECT r.id, r.origin, r.yielded, r.state, r.created_at, r.started_at, r.ended_at, r.reply, r.error_code, r.error, r.model_answered, s.key,
       CASE WHEN r.state = 'queued'
            THEN (SELECT count(*) FROM runs q WHERE q.session = r.session AND q.state = 'queued' AND q.n < r.n)
       END AS ahead
FROM runs r JOIN sessions s ON s.id = r.session
WHERE r.n IN (SELECT n FROM runs WHERE id >= :first AND id < :after ORDER BY n DESC LIMIT :limit)
ORDER BY r.n DESC;
