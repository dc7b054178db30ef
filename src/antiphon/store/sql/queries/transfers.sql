-- name: conversation
-- A transcript with the session it belongs to, as an export needs them.
SELECT s.*, t.id AS named_transcript, t.session_id AS named_session_id, t.started_at
FROM transcripts t JOIN sessions s ON s.key = t.key
WHERE t.id = :transcript;

-- name: conversations
SELECT s.*, t.id AS named_transcript, t.session_id AS named_session_id, t.started_at
FROM transcripts t JOIN sessions s ON s.key = t.key
WHERE t.id > :after ORDER BY t.id LIMIT :limit;

-- name: entry_at
SELECT entry FROM messages WHERE transcript = :transcript AND seq = :seq;

-- name: has_session_id
SELECT 1 AS present FROM transcripts WHERE session_id = :session_id;

-- name: forgotten
-- Conversations that were deleted since then and have not been imported again.
SELECT c.id, c.answer AS session_id FROM commands c
WHERE c.id > :after AND c.id < :until AND c.digest = '' AND c.created_at >= :since
  AND NOT EXISTS (SELECT 1 FROM transcripts t WHERE t.session_id = c.answer)
ORDER BY c.id LIMIT :limit;
