-- name: append
INSERT INTO messages (transcript, seq, entry, role, run, body, created_at)
VALUES (:transcript, :seq, :entry, :role, :run, :body, :now);

-- name: before
SELECT seq, entry, role, body, created_at FROM messages
WHERE transcript = :transcript AND seq < :before ORDER BY seq DESC LIMIT :limit;

-- name: before_without_tools
SELECT seq, entry, role, body, created_at FROM messages
WHERE transcript = :transcript AND seq < :before AND role <> 'toolResult' ORDER BY seq DESC LIMIT :limit;

-- name: after
SELECT seq, entry, role, body, created_at FROM messages
WHERE transcript = :transcript AND seq > :after ORDER BY seq LIMIT :limit;

-- name: after_without_tools
SELECT seq, entry, role, body, created_at FROM messages
WHERE transcript = :transcript AND seq > :after AND role <> 'toolResult' ORDER BY seq LIMIT :limit;

-- name: latest_compaction
SELECT seq, body FROM messages WHERE transcript = :transcript AND role = 'compaction' ORDER BY seq DESC LIMIT 1;

-- name: tail
-- Backwards through what a prompt may contain; the caller stops when it has enough.
SELECT seq, role, body, run FROM messages
WHERE transcript = :transcript AND seq >= :since AND seq < :before AND role <> 'compaction'
ORDER BY seq DESC LIMIT :limit;

-- name: since_last_answer
-- The run's last assistant entry and what followed it.
SELECT seq, role, body FROM messages
WHERE transcript = :transcript AND seq >= (SELECT max(seq) FROM messages
                                           WHERE transcript = :transcript AND seq >= :first AND role = 'assistant')
ORDER BY seq LIMIT 1000;

-- name: last_seq
SELECT coalesce(max(seq), 0) AS last_seq FROM messages WHERE transcript = :transcript;
