-- name: counts
-- Counts for all replicas together. `session > 0` is always true; it lets SQLite choose the small indexes of active runs.
-- A run queued behind an active one of its session does not count as idle. No count goes beyond `most`.
SELECT (SELECT count(*) FROM (SELECT 1 FROM runs WHERE state = 'queued' AND session > 0 LIMIT :most) q) AS queued,
       (SELECT count(*) FROM (SELECT 1 FROM runs WHERE state = 'running' AND session > 0 LIMIT :most) p) AS running,
       (SELECT min(i.created_at) FROM
         (SELECT r.created_at FROM runs r WHERE r.state = 'queued' AND r.session > 0 AND NOT EXISTS
           (SELECT 1 FROM runs a WHERE a.session = r.session AND a.state = 'running') LIMIT :most) i) AS idle_since,
       (SELECT count(*) FROM
         (SELECT 1 FROM runs r LEFT JOIN owners o ON o.id = r.owner
          WHERE r.state = 'running' AND r.session > 0 AND coalesce(o.lease_until, 0) <= :now LIMIT :most) l) AS abandoned,
       (SELECT count(*) FROM owners WHERE lease_until > :now) AS replicas,
       (SELECT count(*) FROM (SELECT 1 FROM deliveries WHERE state = 'pending' LIMIT :most) w) AS pending,
       (SELECT count(*) FROM (SELECT 1 FROM deliveries WHERE state = 'ambiguous' LIMIT :most) u) AS ambiguous,
       (SELECT count(*) FROM (SELECT 1 FROM deliveries WHERE state = 'dead' LIMIT :most) d) AS dead,
       (SELECT count(*) FROM (SELECT 1 FROM deliveries WHERE state = 'expired' LIMIT :most) e) AS expired;
