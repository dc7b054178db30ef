-- name: insert_if_absent
INSERT INTO secrets (name, value) VALUES (:name, :value) ON CONFLICT (name) DO NOTHING;

-- name: value
SELECT value FROM secrets WHERE name = :name;
