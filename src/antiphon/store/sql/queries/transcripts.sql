-- name: append
-- On PostgreSQL what is to be indexed is noted down: numbers are given out before they can be seen there.
/*pg: WITH appended AS ( */
INSERT INTO messages (transcript, seq, entry, role, run, body, created_at)
VALUES (:transcript, :seq, :entry, :role, :run, :body, :now)
/*pg: RETURNING id) INSERT INTO unindexed (message) SELECT id FROM appended */;

-- name: before
-- What an announce step came to is shown when it was posted, a note unless it was kept from people.
SELECT m.seq, m.entry, m.role, m.body, m.created_at, r.id AS run_id,
       CASE r.origin WHEN 'announce' THEN coalesce(r.shown, 0) WHEN 'note' THEN coalesce(r.shown, 1) ELSE 1 END AS shown
FROM messages m LEFT JOIN runs r ON r.n = m.run
WHERE m.transcript = :transcript AND m.seq < :seq ORDER BY m.seq DESC LIMIT :limit;

-- name: before_without_tools
SELECT m.seq, m.entry, m.role, m.body, m.created_at, r.id AS run_id,
       CASE r.origin WHEN 'announce' THEN coalesce(r.shown, 0) WHEN 'note' THEN coalesce(r.shown, 1) ELSE 1 END AS shown
FROM messages m LEFT JOIN runs r ON r.n = m.run
WHERE m.transcript = :transcript AND m.seq < :seq AND m.role <> 'toolResult' ORDER BY m.seq DESC LIMIT :limit;

-- name: after
SELECT m.seq, m.entry, m.role, m.body, m.created_at, r.id AS run_id,
       CASE r.origin WHEN 'announce' THEN coalesce(r.shown, 0) WHEN 'note' THEN coalesce(r.shown, 1) ELSE 1 END AS shown
FROM messages m LEFT JOIN runs r ON r.n = m.run
WHERE m.transcript = :transcript AND m.seq > :seq ORDER BY m.seq LIMIT :limit;

-- name: after_without_tools
SELECT m.seq, m.entry, m.role, m.body, m.created_at, r.id AS run_id,
       CASE r.origin WHEN 'announce' THEN coalesce(r.shown, 0) WHEN 'note' THEN coalesce(r.shown, 1) ELSE 1 END AS shown
FROM messages m LEFT JOIN runs r ON r.n = m.run
WHERE m.transcript = :transcript AND m.seq > :seq AND m.role <> 'toolResult' ORDER BY m.seq LIMIT :limit;

-- name: before_narrowed
-- Down to :edge, however little is found: a page may not read a whole transcript.
SELECT m.seq, m.entry, m.role, m.body, m.created_at, r.id AS run_id,
       CASE r.origin WHEN 'announce' THEN coalesce(r.shown, 0) WHEN 'note' THEN coalesce(r.shown, 1) ELSE 1 END AS shown
FROM messages m LEFT JOIN runs r ON r.n = m.run
WHERE m.transcript = :transcript AND m.seq < :seq AND m.seq >= :edge AND m.created_at >= :since AND m.role <> :hidden
  AND (CAST(:roles AS TEXT) IS NULL OR m.role IN
       (SELECT /*lite*/ value FROM json_each(:roles) /*pg: json_array_elements_text(CAST(CAST(:roles AS TEXT) AS json)) */))
ORDER BY m.seq DESC LIMIT :limit;

-- name: after_narrowed
SELECT m.seq, m.entry, m.role, m.body, m.created_at, r.id AS run_id,
       CASE r.origin WHEN 'announce' THEN coalesce(r.shown, 0) WHEN 'note' THEN coalesce(r.shown, 1) ELSE 1 END AS shown
FROM messages m LEFT JOIN runs r ON r.n = m.run
WHERE m.transcript = :transcript AND m.seq > :seq AND m.seq <= :edge AND m.created_at >= :since AND m.role <> :hidden
  AND (CAST(:roles AS TEXT) IS NULL OR m.role IN
       (SELECT /*lite*/ value FROM json_each(:roles) /*pg: json_array_elements_text(CAST(CAST(:roles AS TEXT) AS json)) */))
ORDER BY m.seq LIMIT :limit;

-- name: latest_compaction
SELECT seq, body FROM messages WHERE transcript = :transcript AND role = 'compaction' ORDER BY seq DESC LIMIT 1;

-- name: tail
-- Backwards through what a prompt may contain; the caller stops when it has enough.
SELECT seq, role, body, run FROM messages
WHERE transcript = :transcript AND seq >= :since AND seq < :before AND role <> 'compaction'
ORDER BY seq DESC LIMIT :limit;

-- name: first_of_last
-- Where the last `others` + 1 entries that a prompt may contain begin: not with a tool's result, which would lose
-- its call.
SELECT max(seq) AS seq FROM messages
WHERE transcript = :transcript AND seq >= :since AND role NOT IN ('toolResult', 'compaction')
  AND seq <= (SELECT seq FROM messages WHERE transcript = :transcript AND seq >= :since AND role <> 'compaction'
              ORDER BY seq DESC LIMIT 1 OFFSET :others);

-- name: measure
SELECT count(*) AS entries, CAST(coalesce(sum(length(body)), 0) AS BIGINT) AS characters FROM messages
WHERE transcript = :transcript AND seq >= :since AND seq < :before AND role <> 'compaction';

-- name: since_last_answer
-- The run's last assistant entry and what followed it.
SELECT seq, role, body FROM messages
WHERE transcript = :transcript AND seq >= (SELECT max(seq) FROM messages
                                           WHERE transcript = :transcript AND seq >= :first AND role = 'assistant')
ORDER BY seq LIMIT 1000;

-- name: last_seq
SELECT coalesce(max(seq), 0) AS last_seq FROM messages WHERE transcript = :transcript;
