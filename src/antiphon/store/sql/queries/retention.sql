-- Delete finished rows past their retention, oldest first, a bounded number at a time.

-- name: delete_old_exchanges
DELETE FROM exchanges WHERE n IN
  (SELECT n FROM exchanges WHERE settled_at < :before ORDER BY settled_at LIMIT :limit);

-- name: delete_old_tasks
-- Only tasks whose child has been deleted with its files, and that no unsettled task below reports through.
DELETE FROM tasks WHERE n IN
  (SELECT t.n FROM tasks t
   WHERE t.settled_at < :before AND (t.archive_at IS NULL OR t.archived_at IS NOT NULL)
     AND NOT EXISTS (SELECT 1 FROM sessions c WHERE c.id = t.child)
     AND NOT EXISTS (SELECT 1 FROM tasks b WHERE b.requester = t.child AND b.phase <> 'settled')
   ORDER BY t.settled_at LIMIT :limit);

-- name: delete_old_deliveries
-- Dead and ambiguous deliveries stay until an operator has dealt with them.
DELETE FROM deliveries WHERE n IN
  (SELECT n FROM deliveries WHERE state IN ('delivered', 'blocked', 'expired') AND settled_at < :before
   ORDER BY settled_at, n LIMIT :limit);

-- name: delete_old_delivery_parts
-- The parts of the same deliveries; they are deleted first.
DELETE FROM delivery_parts WHERE delivery IN
  (SELECT n FROM deliveries WHERE state IN ('delivered', 'blocked', 'expired') AND settled_at < :before
   ORDER BY settled_at, n LIMIT :limit);

-- name: delete_old_chains
-- A chain with active work keeps its count, however old it is: the count is what ends it.
DELETE FROM chains WHERE id IN
  (SELECT id FROM chains
   WHERE created_at < :before AND id NOT IN
     (SELECT chain FROM runs WHERE state = 'running' AND session > 0 AND chain IS NOT NULL
      UNION SELECT chain FROM runs WHERE state = 'queued' AND session > 0 AND chain IS NOT NULL
      UNION SELECT chain FROM tasks WHERE phase <> 'settled')
   ORDER BY created_at LIMIT :limit);

-- name: delete_old_commands
DELETE FROM commands WHERE id IN (SELECT id FROM commands WHERE created_at < :before ORDER BY created_at LIMIT :limit);
