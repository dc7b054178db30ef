-- name: renew
INSERT INTO owners (id, lease_until, name, address, version, started_at, seen_at)
VALUES (:id, :until, :name, :address, :version, :started_at, :now)
ON CONFLICT (id) DO UPDATE SET lease_until = excluded.lease_until, seen_at = excluded.seen_at,
  address = excluded.address;

-- name: drop_others
DELETE FROM owners WHERE id <> :id;

-- name: expired
SELECT o.id FROM owners o WHERE o.lease_until <= :now AND NOT EXISTS
  (SELECT 1 FROM runs r WHERE r.owner = o.id AND r.state = 'running' AND r.session > 0) LIMIT 100;

-- name: drop
DELETE FROM owners WHERE id = :id;

-- name: excuse
-- A stop that was asked for is not the run's fault and does not count as an attempt.
UPDATE runs SET attempts = attempts - 1 WHERE owner = :owner AND state = 'running' AND session > 0 AND attempts > 0;

-- name: keep_watch
UPDATE watch SET owner = :owner, until = :until WHERE id = 1 AND (owner = :owner OR until <= :now);

-- name: leave_watch
UPDATE watch SET until = 0 WHERE id = 1 AND owner = :owner;

-- name: listed
SELECT o.id, o.name, o.address, o.version, o.started_at, o.seen_at, o.lease_until,
       (SELECT count(*) FROM runs r WHERE r.owner = o.id AND r.state = 'running' AND r.session > 0) AS lanes,
       (SELECT count(*) FROM watch w WHERE w.owner = o.id AND w.until > :now) AS watching
FROM owners o ORDER BY o.started_at, o.id LIMIT 1000;
