-- name: conversation
-- A transcript and its session, for an export.
SELECT s.*, t.id AS named_transcript, t.session_id AS named_session_id, t.started_at
FROM transcripts t JOIN sessions s ON s.key = t.key
WHERE t.id = :transcript;

-- name: conversations
SELECT s.*, t.id AS named_transcript, t.session_id AS named_session_id, t.started_at
FROM transcripts t JOIN sessions s ON s.key = t.key
WHERE t.id > :after ORDER BY t.id LIMIT :limit;

-- name: current_conversation
SELECT t.id, t.session_id, t.started_at, t.ended_at, s.extra FROM sessions s JOIN transcripts t ON t.id = s.transcript
WHERE s.key = :key;

-- name: recent_conversations
-- The current conversation and the two newest: `/new` may just have ended one.
SELECT t.id, t.session_id, t.started_at, t.ended_at, s.extra FROM transcripts t JOIN sessions s ON s.key = t.key
WHERE t.id IN (SELECT c.transcript FROM sessions c WHERE c.key = :key
               UNION SELECT newest.id FROM (SELECT p.id FROM transcripts p WHERE p.key = :key
                                            ORDER BY p.id DESC LIMIT 2) AS newest)
ORDER BY t.id;

-- name: entry_at
SELECT entry FROM messages WHERE transcript = :transcript AND seq = :seq;

-- name: has_session_id
SELECT 1 AS present FROM transcripts WHERE session_id = :session_id;

-- name: deleted_conversations
-- Conversations deleted since then and not imported again.
SELECT c.id, c.answer AS session_id FROM commands c
WHERE c.id > :after AND c.id < :until AND c.digest = '' AND c.created_at >= :since
  AND NOT EXISTS (SELECT 1 FROM transcripts t WHERE t.session_id = c.answer)
ORDER BY c.id LIMIT :limit;
