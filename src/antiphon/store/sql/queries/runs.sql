-- name: insert
-- Unless the id was used before, or the lane already has its maximum of queued runs.
-- A later step of an exchange is answered by the agent that its first step was addressed to.
INSERT INTO runs (id, session, origin, digest, input, options, instructions, model, thinking, target, deadline_at, exchange, task,
                  chain, hop, agent_id, created_at)
SELECT :id, CAST(:session AS BIGINT), :origin, :digest, :input, :options, :instructions, :model, :thinking, :target,
       CAST(:deadline_at AS BIGINT), CAST(:exchange AS BIGINT), CAST(:task AS BIGINT), :chain, CAST(:hop AS INTEGER),
       coalesce(CAST(:agent_id AS TEXT), CASE WHEN CAST(:exchange AS BIGINT) IS NOT NULL THEN
                (SELECT f.agent_id FROM exchanges e JOIN runs f ON f.id = e.id
                 WHERE e.n = CAST(:exchange AS BIGINT) AND e.target = CAST(:session AS BIGINT)) END),
       CAST(:now AS BIGINT)
WHERE NOT EXISTS (SELECT 1 FROM commands WHERE id = :id)
  AND (CAST(:others AS BIGINT) IS NULL
       OR NOT EXISTS (SELECT 1 FROM runs q WHERE q.session = :session AND q.state = 'queued' ORDER BY q.n LIMIT 1 OFFSET :others))
ON CONFLICT (id) DO NOTHING;

-- name: record_command
INSERT INTO runs (id, session, origin, digest, input, state, reply, created_at, ended_at)
SELECT :id, CAST(:session AS BIGINT), 'command', :digest, '', 'ok', CAST(:reply AS TEXT), CAST(:now AS BIGINT),
       CAST(:now AS BIGINT)
WHERE NOT EXISTS (SELECT 1 FROM commands WHERE id = :id)
ON CONFLICT (id) DO NOTHING;

-- name: find_accepted
-- The run that an id belongs to, or the command, whose digest equals no run's.
SELECT n, id, session, digest, state FROM runs WHERE id = :id
UNION ALL
SELECT NULL, id, NULL, digest, 'ok' FROM commands WHERE id = :id;

-- name: ended_or_stopping
-- A row if the run has ended or was asked to stop.
SELECT 1 AS over FROM runs WHERE id = :id AND (cancel_at IS NOT NULL OR state NOT IN ('queued', 'running'));

-- name: by_id
SELECT r.n, r.id, r.origin, r.yielded, r.state, r.created_at, r.started_at, r.ended_at, r.reply, r.error_code, r.error, r.model_answered,
       s.key, s.agent_id,
       CAST(:viewer AS TEXT) IS NOT NULL AND EXISTS (SELECT 1 FROM lineage l JOIN sessions a ON a.id = l.ancestor
                                       WHERE l.descendant = s.id AND a.key = :viewer) AS descendant,
       CASE WHEN r.state = 'queued'
            THEN (SELECT count(*) FROM runs q WHERE q.session = r.session AND q.state = 'queued' AND q.n < r.n)
       END AS ahead
FROM runs r JOIN sessions s ON s.id = r.session WHERE r.id = :id;

-- name: last_answer
-- The run's last assistant entry, and the options the run was started with.
SELECT m.body, r.options FROM runs r JOIN messages m ON m.transcript = r.transcript AND m.seq >= r.first_seq AND m.run = r.n
WHERE r.id = :id AND m.role = 'assistant' ORDER BY m.seq DESC LIMIT 1;

-- name: sum_usage
SELECT CAST(coalesce(sum(input), 0) AS BIGINT) AS input, CAST(coalesce(sum(output), 0) AS BIGINT) AS output,
       CASE WHEN count(*) = count(cost) THEN sum(cost) END AS cost
FROM usage WHERE run_id = :id;

-- name: active_with_lease
-- The running run of a lane, and until when its owner's lease lasts.
SELECT r.n, r.id, r.session, r.input, r.options, r.instructions, r.model, r.thinking, r.deadline_at, r.cancel_at, r.owner,
       r.attempts, r.transcript, r.first_seq, r.created_at, r.started_at, r.epoch, r.origin, r.target, r.exchange, r.task,
       r.agent_id, coalesce(o.lease_until, 0) AS lease_until
FROM runs r LEFT JOIN owners o ON o.id = r.owner WHERE r.session = :session AND r.state = 'running';

-- name: next_queued
SELECT r.n, r.id, r.session, r.input, r.options, r.instructions, r.model, r.thinking, r.deadline_at, r.cancel_at, r.owner,
       r.attempts, r.transcript, r.first_seq, r.created_at, r.started_at, r.epoch, r.origin, r.target, r.exchange, r.task, r.agent_id
FROM runs r WHERE r.session = :session AND r.state = 'queued' ORDER BY r.n LIMIT 1;

-- name: start
UPDATE runs SET state = 'running', owner = :owner, epoch = :epoch, attempts = attempts + 1,
       transcript = :transcript, first_seq = coalesce(first_seq, :first_seq), started_at = coalesce(started_at, :now)
WHERE n = :n AND state IN ('queued', 'running') AND epoch = :expected_epoch;

-- name: set_options
UPDATE runs SET options = :options WHERE n = :n;

-- name: end
-- A terminal state is final.
UPDATE runs SET state = :state, reply = :reply, error_code = :error_code, error = :error,
       model_answered = :model_answered, last_seq = :last_seq, yielded = :yielded, ended_at = :now
WHERE n = :n AND state IN ('queued', 'running');

-- name: exchange_and_target
-- The exchange and target that a wake run takes over from this one.
SELECT exchange, target FROM runs WHERE id = :id;

-- name: complete_note
UPDATE runs SET state = 'ok', transcript = :transcript, first_seq = :first_seq, last_seq = :last_seq, started_at = :now,
       ended_at = :now
WHERE n = :n AND state = 'queued';

-- name: rename_queued
UPDATE runs SET id = :id WHERE n = :n AND state = 'queued' AND first_seq IS NULL;

-- name: copy_queued
-- A queued run under another id.
INSERT INTO runs (id, session, origin, digest, input, options, instructions, model, thinking, target, deadline_at, exchange, task,
                  chain, hop, agent_id, woken_by, created_at)
SELECT :id, session, origin, digest, input, options, instructions, model, thinking, target, deadline_at, exchange, task,
       chain, hop, agent_id, woken_by, created_at
FROM runs WHERE n = :n RETURNING n;

-- name: convert_to_note
-- It keeps its place in the queue.
UPDATE runs SET origin = 'note', input = :input, options = :options, instructions = NULL, model = NULL, thinking = NULL,
       target = NULL, deadline_at = NULL, exchange = NULL, task = NULL, chain = NULL, woken_by = NULL
WHERE n = :n;

-- name: queued_in_session
SELECT r.n, r.id, r.session, r.origin, r.target, r.exchange, r.task, s.key FROM runs r JOIN sessions s ON s.id = r.session
WHERE r.session = :session AND r.state = 'queued' ORDER BY r.n LIMIT 5000;

-- name: queued_wake
-- A queued wake run of this agent after all notes, which can also answer for another yielded run.
SELECT w.id FROM runs w WHERE w.session = :session AND w.state = 'queued' AND w.origin = 'wake'
  AND coalesce(w.agent_id, '') = coalesce(CAST(:agent_id AS TEXT), '') AND NOT EXISTS
  (SELECT 1 FROM runs q WHERE q.session = w.session AND q.state = 'queued' AND q.origin = 'note' AND q.n > w.n)
ORDER BY w.n DESC LIMIT 1;

-- name: assign_exchange
UPDATE runs SET exchange = :exchange, target = :target
WHERE id = :id AND state = 'queued' AND exchange IS NULL AND target IS NULL;

-- name: wait_for_wake
UPDATE runs SET woken_by = '' WHERE id = :id AND state = 'running';

-- name: wait_for_wake_if_unassigned
UPDATE runs SET woken_by = '' WHERE id = :id AND woken_by IS NULL;

-- name: assign_wake
UPDATE runs SET woken_by = :wake WHERE id = :id;

-- name: waiting_for_wake
SELECT id, exchange, target, yielded, agent_id FROM runs WHERE woken_by = '' AND session = :session ORDER BY n;

-- name: stop_waiting
UPDATE runs SET woken_by = NULL WHERE woken_by = '' AND session = :session;

-- name: yielded_runs_of_wake
-- Yielded runs that this run answers for.
SELECT id, exchange, target FROM runs WHERE woken_by = :id AND yielded = 1 ORDER BY n;

-- name: clear_wake
UPDATE runs SET woken_by = NULL WHERE woken_by = :id;

-- name: yield_state
-- A yielding run; a replica of the previous version records a yield in the session only.
SELECT r.id, r.exchange, r.target,
       coalesce(r.woken_by, CASE WHEN s.yielded IS NOT NULL AND s.yield_run = r.id THEN '' END) AS woken_by
FROM runs r JOIN sessions s ON s.id = r.session WHERE r.id = :id;

-- name: active_in_session
SELECT n, id, cancel_at, transcript, first_seq FROM runs WHERE session = :session AND state = 'running';

-- name: request_stop
UPDATE runs SET cancel_at = coalesce(cancel_at, :now) WHERE n = :n AND state = 'running';

-- name: active_tree
-- The session, and those of its descendants that a stop can change.
SELECT s.id, s.key FROM sessions s WHERE s.id = :session
UNION ALL
SELECT s.id, s.key FROM lineage l JOIN sessions s ON s.id = l.descendant
WHERE l.ancestor = :session
  AND (s.yielded IS NOT NULL OR s.yield_run IS NOT NULL
       OR EXISTS (SELECT 1 FROM runs q WHERE q.session = s.id AND q.state = 'queued')
       OR EXISTS (SELECT 1 FROM runs a WHERE a.session = s.id AND a.state = 'running')
       OR EXISTS (SELECT 1 FROM tasks t WHERE t.requester = s.id AND t.phase <> 'settled')
       OR EXISTS (SELECT 1 FROM tasks w WHERE w.child_key = s.key AND w.phase = 'waiting')
       OR EXISTS (SELECT 1 FROM exec_commands c WHERE c.session = s.id AND c.state IN ('starting', 'running')))
LIMIT 10000;

-- name: active_children
SELECT DISTINCT t.child AS id FROM tasks t WHERE t.requester = :session AND t.phase <> 'settled' LIMIT 1000;

-- name: overdue
SELECT r.n, r.id, r.session, r.origin, r.input, r.target, r.exchange, r.task, s.key FROM runs r
JOIN sessions s ON s.id = r.session
WHERE r.state = 'queued' AND r.deadline_at <= :now ORDER BY r.deadline_at LIMIT 500;

-- name: overdue_stops
-- `session > 0` is always true; it lets SQLite choose the small index of active runs instead of the table.
SELECT n, id, session, transcript, first_seq, cancel_at, origin, target, exchange, task FROM runs
WHERE state = 'running' AND session > 0 AND (cancel_at <= :before OR deadline_at <= :before) LIMIT 500;

-- name: lanes_with_work
-- Lanes to check after a start or a lost hint: queued work, or an active run whose owner is gone.
SELECT DISTINCT session FROM runs
WHERE session > :after AND state = 'queued' AND created_at <= :before
  AND NOT EXISTS (SELECT 1 FROM runs a JOIN owners o ON o.id = a.owner
                  WHERE a.session = runs.session AND a.state = 'running' AND o.lease_until > :now)
UNION
SELECT r.session FROM runs r LEFT JOIN owners o ON o.id = r.owner
WHERE r.session > :after AND r.state = 'running' AND coalesce(o.lease_until, 0) <= :now
ORDER BY session LIMIT :limit;

-- name: has_work
SELECT 1 AS waiting FROM runs r LEFT JOIN owners o ON o.id = r.owner
WHERE r.session = :lane AND r.state = 'running' AND coalesce(o.lease_until, 0) <= :now
UNION ALL
SELECT 1 FROM runs q WHERE q.session = :lane AND q.state = 'queued'
  AND NOT EXISTS (SELECT 1 FROM runs a WHERE a.session = :lane AND a.state = 'running')
LIMIT 1;

-- name: running_of_owner
SELECT session, id FROM runs WHERE owner = :owner AND state = 'running' AND session > 0 LIMIT 20000;

-- name: reset_attempts
-- A run that makes progress is not a poison run, however often the process crashed.
UPDATE runs SET attempts = 1 WHERE n = :n;

-- name: stop_requested
SELECT id FROM runs WHERE state = 'running' AND session > 0 AND cancel_at IS NOT NULL AND owner = :owner LIMIT 20000;

-- name: record_usage
INSERT INTO usage (at, run_id, session_key, session_id, root_key, agent_id, provider, model,
                   input, output, cache_read, cache_write, cost)
VALUES (:now, :run_id, :session_key, :session_id, :root_key, :agent_id, :provider, :model,
        :input, :output, :cache_read, :cache_write, :cost);

-- name: usage_by_model
SELECT provider, model, count(*) AS calls, CAST(sum(input) AS BIGINT) AS input, CAST(sum(output) AS BIGINT) AS output,
       CAST(sum(cache_read) AS BIGINT) AS cache_read, CAST(sum(cache_write) AS BIGINT) AS cache_write,
       CASE WHEN count(*) = count(cost) THEN sum(cost) END AS cost
FROM usage WHERE session_key = :key GROUP BY provider, model ORDER BY provider NULLS FIRST, model NULLS FIRST LIMIT 200;

-- name: usage_by_tree
SELECT provider, model, count(*) AS calls, CAST(sum(input) AS BIGINT) AS input, CAST(sum(output) AS BIGINT) AS output,
       CAST(sum(cache_read) AS BIGINT) AS cache_read, CAST(sum(cache_write) AS BIGINT) AS cache_write,
       CASE WHEN count(*) = count(cost) THEN sum(cost) END AS cost
FROM usage WHERE root_key = :key OR session_key = :key OR session_key IN
  (SELECT s.key FROM lineage l JOIN sessions a ON a.id = l.ancestor JOIN sessions s ON s.id = l.descendant
   WHERE a.key = :key)
GROUP BY provider, model ORDER BY provider NULLS FIRST, model NULLS FIRST LIMIT 200;
