-- name: find_by_id
-- An id belongs to one command or one run, never to both.
SELECT digest, answer FROM commands WHERE id = :id
UNION ALL
SELECT digest, NULL FROM runs WHERE id = :id;

-- name: record
INSERT INTO commands (id, digest, answer, created_at) VALUES (:id, :digest, :answer, :now);
