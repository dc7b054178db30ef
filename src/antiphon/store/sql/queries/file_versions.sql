-- name: session_id
SELECT id FROM sessions WHERE key = :key;

-- name: find
SELECT seen, written FROM file_versions WHERE session = :session AND path = :path;

-- name: record_read
INSERT INTO file_versions (session, path, seen, updated_at) VALUES (:session, :path, :seen, :now)
ON CONFLICT (session, path) DO UPDATE SET seen = :seen, updated_at = :now;

-- name: record_write
INSERT INTO file_versions (session, path, seen, written, call, updated_at)
VALUES (:session, :path, :seen, :written, :call, :now)
ON CONFLICT (session, path) DO UPDATE SET seen = :seen, written = :written, call = :call, updated_at = :now;

-- name: delete_oldest
DELETE FROM file_versions
WHERE session = :session AND updated_at < (
  SELECT updated_at FROM file_versions WHERE session = :session ORDER BY updated_at DESC LIMIT 1 OFFSET :kept
);

-- name: delete_of_session
DELETE FROM file_versions WHERE session = :session;

-- name: written_by
SELECT path, written FROM file_versions WHERE session = :session AND call = :call AND written IS NOT NULL;
