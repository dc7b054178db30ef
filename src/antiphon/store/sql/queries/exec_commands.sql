-- name: by_key
SELECT * FROM exec_commands WHERE key = :key;

-- name: by_id
SELECT * FROM exec_commands WHERE id = :id AND session_key = :session_key AND removed = 0;

-- name: of_session
SELECT * FROM exec_commands WHERE session_key = :session_key AND removed = 0
ORDER BY created_at DESC, id LIMIT :limit;

-- name: count_live
SELECT count(*) AS number FROM exec_commands WHERE session = :session AND state IN ('starting', 'running');

-- name: insert
INSERT INTO exec_commands (key, id, session, session_key, agent_id, sandboxed, run_id, host, owner, backend, command,
                           workdir, timeout_seconds, state, created_at)
VALUES (:key, :id, :session, :session_key, :agent_id, :sandboxed, :run_id, :host, :owner, :backend, :command, :workdir,
        :timeout_seconds, 'starting', :now)
ON CONFLICT DO NOTHING;

-- name: continue_in_background
UPDATE exec_commands SET state = 'running', background = 1
WHERE key = :key AND state IN ('starting', 'running') AND stop_reason IS NULL;

-- name: end
UPDATE exec_commands SET state = :state, exit_code = :exit_code, signal = :signal, error = :error, timed_out = :timed_out,
       output = :output, output_bytes = :output_bytes, output_file = :output_file, ended_at = :now
WHERE key = :key AND state IN ('starting', 'running');

-- name: record_read
UPDATE exec_commands SET read_call = :call, read_from = :start, read_to = :until WHERE key = :key;

-- name: remove
UPDATE exec_commands SET removed = 1 WHERE key = :key;

-- name: stop
UPDATE exec_commands SET stop_reason = coalesce(stop_reason, :reason)
WHERE key = :key AND state IN ('starting', 'running');

-- name: live_of_session
SELECT key, host FROM exec_commands WHERE session = :session AND state IN ('starting', 'running') LIMIT 1000;

-- name: live_sessions
SELECT DISTINCT session_key, agent_id, sandboxed FROM exec_commands WHERE state IN ('starting', 'running');

-- name: live_of_run
SELECT key, host, background FROM exec_commands WHERE run_id = :run_id AND state IN ('starting', 'running') LIMIT 1000;

-- name: live_of_host
SELECT c.key, c.state, c.background, c.stop_reason, r.state AS run_state
FROM exec_commands c LEFT JOIN runs r ON r.id = c.run_id
WHERE c.host = :host AND c.state IN ('starting', 'running') LIMIT 5000;

-- name: to_stop_of_host
SELECT key, stop_reason FROM exec_commands
WHERE host = :host AND state IN ('starting', 'running') AND stop_reason IS NOT NULL LIMIT 1000;

-- name: adopt
UPDATE exec_commands SET owner = :owner WHERE host = :host AND state IN ('starting', 'running');

-- name: without_owner
-- Live commands of other hosts whose process has no lease.
SELECT c.key FROM exec_commands c LEFT JOIN owners o ON o.id = c.owner
WHERE c.host <> :host AND c.state IN ('starting', 'running') AND coalesce(o.lease_until, 0) <= :now LIMIT 1000;

-- name: given_up_of_host
SELECT key FROM exec_commands WHERE host = :host AND state = 'lost' AND ended_at > :since LIMIT 1000;

-- name: delete_oldest
DELETE FROM exec_commands
WHERE session = :session AND state NOT IN ('starting', 'running') AND created_at < (
  SELECT created_at FROM exec_commands WHERE session = :session ORDER BY created_at DESC LIMIT 1 OFFSET :kept
);

-- name: stop_all_of_session
UPDATE exec_commands SET stop_reason = coalesce(stop_reason, :reason)
WHERE session = :session AND state IN ('starting', 'running');

-- name: delete_of_session
DELETE FROM exec_commands WHERE session = :session AND state NOT IN ('starting', 'running');

-- name: delete
DELETE FROM exec_commands WHERE key = :key;
