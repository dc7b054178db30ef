-- name: renew
INSERT INTO owners (id, lease_until, name, address, version, started_at, seen_at)
VALUES (:id, :until, :name, :address, :version, :started_at, :now)
ON CONFLICT (id) DO UPDATE SET lease_until = excluded.lease_until, seen_at = excluded.seen_at,
  address = excluded.address;

-- name: delete_others
DELETE FROM owners WHERE id <> :id;

-- name: expired_without_runs
SELECT o.id FROM owners o WHERE o.lease_until <= :now AND NOT EXISTS
  (SELECT 1 FROM runs r WHERE r.owner = o.id AND r.state = 'running' AND r.session > 0) LIMIT 100;

-- name: delete
DELETE FROM owners WHERE id = :id;

-- name: refund_attempts
-- A requested shutdown is not the run's fault and does not count as an attempt.
UPDATE runs SET attempts = attempts - 1 WHERE owner = :owner AND state = 'running' AND session > 0 AND attempts > 0;

-- name: renew_coordinator_lease
UPDATE watch SET owner = :owner, until = :until WHERE id = 1 AND (owner = :owner OR until <= :now);

-- name: release_coordinator_lease
UPDATE watch SET until = 0 WHERE id = 1 AND owner = :owner;

-- name: list_all
SELECT o.id, o.name, o.address, o.version, o.started_at, o.seen_at, o.lease_until,
       (SELECT count(*) FROM runs r WHERE r.owner = o.id AND r.state = 'running' AND r.session > 0) AS lanes,
       (SELECT count(*) FROM watch w WHERE w.owner = o.id AND w.until > :now) AS watching
FROM owners o ORDER BY o.started_at, o.id LIMIT 1000;
