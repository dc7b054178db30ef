-- name: list_all
SELECT name, scopes, digest, created_at, last_used_at FROM tokens ORDER BY name LIMIT :limit;

-- name: issue
INSERT INTO tokens (name, scopes, digest, created_at) VALUES (:name, :scopes, :digest, :now) ON CONFLICT DO NOTHING;

-- name: revoke
DELETE FROM tokens WHERE name = :name;

-- name: record_use
UPDATE tokens SET last_used_at = :now WHERE digest = :digest;
