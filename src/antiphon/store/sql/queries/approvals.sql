-- name: insert
INSERT INTO approvals (id, call, run_id, session, session_key, agent_id, tool, question, binding, subject, state, always,
                       decided_by, created_at, expires_at, decided_at)
VALUES (:id, :call, :run_id, :session, :session_key, :agent_id, :tool, :question, :binding, :subject, :state, :always,
        :decided_by, :now, :expires_at, :decided_at)
ON CONFLICT DO NOTHING;

-- name: by_call
SELECT * FROM approvals WHERE call = :call;

-- name: by_id
SELECT * FROM approvals WHERE id = :id;

-- name: decide
UPDATE approvals SET state = :state, always = :always, decided_by = :decided_by, decided_at = :now
WHERE id = :id AND state = 'pending' AND expires_at > :now;

-- name: expire
UPDATE approvals SET state = 'expired', decided_at = :now WHERE id = :id AND state = 'pending';

-- name: start
UPDATE approvals SET started_at = :now WHERE id = :id AND state = 'allowed' AND started_at IS NULL;

-- name: pending
SELECT * FROM approvals WHERE state = 'pending' AND expires_at > :now ORDER BY created_at, id LIMIT :limit;

-- name: pending_of_session
SELECT * FROM approvals WHERE session = :session AND state = 'pending' AND expires_at > :now
ORDER BY created_at, id LIMIT :limit;

-- name: pending_of_run
SELECT * FROM approvals WHERE run_id = :run_id AND state = 'pending' LIMIT 200;

-- name: delete_oldest
DELETE FROM approvals
WHERE session = :session AND state <> 'pending' AND created_at < (
  SELECT created_at FROM approvals WHERE session = :session ORDER BY created_at DESC LIMIT 1 OFFSET :kept
);

-- name: delete_of_session
DELETE FROM approvals WHERE session = :session;

-- name: find_grant
SELECT id, subject FROM approval_grants WHERE agent_id = :agent_id AND tool = :tool AND digest = :digest;

-- name: insert_grant
INSERT INTO approval_grants (id, agent_id, tool, digest, subject, decided_by, created_at)
VALUES (:id, :agent_id, :tool, :digest, :subject, :decided_by, :now)
ON CONFLICT DO NOTHING;

-- name: count_grants
SELECT count(*) AS number FROM approval_grants;

-- name: grants
SELECT * FROM approval_grants ORDER BY agent_id, tool, created_at, id LIMIT :limit;

-- name: delete_grant
DELETE FROM approval_grants WHERE id = :id;
