-- name: append
-- PostgreSQL assigns ids before they become visible, so there entries to index are recorded explicitly.
/*pg: WITH appended AS ( */
INSERT INTO messages (transcript, seq, entry, role, run, body, created_at)
VALUES (:transcript, :seq, :entry, :role, :run, :body, :now)
/*pg: RETURNING id) INSERT INTO unindexed (message) SELECT id FROM appended */;

-- name: page_before
-- An announce entry is shown once it was delivered, a note unless it was hidden from people.
SELECT m.seq, m.entry, m.role, m.body, m.created_at, r.id AS run_id,
       CASE r.origin WHEN 'announce' THEN coalesce(r.shown, 0) WHEN 'note' THEN coalesce(r.shown, 1) ELSE 1 END AS shown
FROM messages m LEFT JOIN runs r ON r.n = m.run
WHERE m.transcript = :transcript AND m.seq < :seq ORDER BY m.seq DESC LIMIT :limit;

-- name: page_before_without_tools
SELECT m.seq, m.entry, m.role, m.body, m.created_at, r.id AS run_id,
       CASE r.origin WHEN 'announce' THEN coalesce(r.shown, 0) WHEN 'note' THEN coalesce(r.shown, 1) ELSE 1 END AS shown
FROM messages m LEFT JOIN runs r ON r.n = m.run
WHERE m.transcript = :transcript AND m.seq < :seq AND m.role <> 'toolResult' ORDER BY m.seq DESC LIMIT :limit;

-- name: latest_entries
-- The last entry of each transcript that is not a tool result. A body longer than `max_bytes` is returned as ''.
SELECT m.transcript, m.seq, m.entry, m.role, CASE WHEN length(m.body) <= :max_bytes THEN m.body ELSE '' END AS body,
       m.created_at, r.id AS run_id,
       CASE r.origin WHEN 'announce' THEN coalesce(r.shown, 0) WHEN 'note' THEN coalesce(r.shown, 1) ELSE 1 END AS shown
FROM (SELECT (SELECT l.id FROM messages l WHERE l.transcript = CAST(t.value AS BIGINT) AND l.role <> 'toolResult'
              ORDER BY l.seq DESC LIMIT 1) AS id
      FROM /*lite*/ json_each(:transcripts) AS t /*pg: json_array_elements_text(CAST(:transcripts AS json)) AS t(value) */) AS latest
JOIN messages m ON m.id = latest.id LEFT JOIN runs r ON r.n = m.run;

-- name: page_after
SELECT m.seq, m.entry, m.role, m.body, m.created_at, r.id AS run_id,
       CASE r.origin WHEN 'announce' THEN coalesce(r.shown, 0) WHEN 'note' THEN coalesce(r.shown, 1) ELSE 1 END AS shown
FROM messages m LEFT JOIN runs r ON r.n = m.run
WHERE m.transcript = :transcript AND m.seq > :seq ORDER BY m.seq LIMIT :limit;

-- name: page_after_without_tools
SELECT m.seq, m.entry, m.role, m.body, m.created_at, r.id AS run_id,
       CASE r.origin WHEN 'announce' THEN coalesce(r.shown, 0) WHEN 'note' THEN coalesce(r.shown, 1) ELSE 1 END AS shown
FROM messages m LEFT JOIN runs r ON r.n = m.run
WHERE m.transcript = :transcript AND m.seq > :seq AND m.role <> 'toolResult' ORDER BY m.seq LIMIT :limit;

-- name: page_before_filtered
-- Reads no further than :edge, so that a sparse page does not read a whole transcript.
SELECT m.seq, m.entry, m.role, m.body, m.created_at, r.id AS run_id,
       CASE r.origin WHEN 'announce' THEN coalesce(r.shown, 0) WHEN 'note' THEN coalesce(r.shown, 1) ELSE 1 END AS shown
FROM messages m LEFT JOIN runs r ON r.n = m.run
WHERE m.transcript = :transcript AND m.seq < :seq AND m.seq >= :edge AND m.created_at >= :since AND m.role <> :hidden
  AND (CAST(:roles AS TEXT) IS NULL OR m.role IN
       (SELECT /*lite*/ value FROM json_each(:roles) /*pg: json_array_elements_text(CAST(CAST(:roles AS TEXT) AS json)) */))
ORDER BY m.seq DESC LIMIT :limit;

-- name: page_after_filtered
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
-- Backwards through the entries that a prompt may contain; the caller stops when it has enough.
SELECT seq, role, body, run FROM messages
WHERE transcript = :transcript AND seq >= :since AND seq < :before AND role <> 'compaction'
ORDER BY seq DESC LIMIT :limit;

-- name: start_of_last_entries
-- The start of the last `others` + 1 entries that a prompt may contain. Never a tool result, which would lose its call.
SELECT max(seq) AS seq FROM messages
WHERE transcript = :transcript AND seq >= :since AND role NOT IN ('toolResult', 'compaction')
  AND seq <= (SELECT seq FROM messages WHERE transcript = :transcript AND seq >= :since AND role <> 'compaction'
              ORDER BY seq DESC LIMIT 1 OFFSET :others);

-- name: measure
SELECT count(*) AS entries, CAST(coalesce(sum(length(body)), 0) AS BIGINT) AS characters FROM messages
WHERE transcript = :transcript AND seq >= :since AND seq < :before AND role <> 'compaction';

-- name: since_last_answer
-- The run's last assistant entry and everything after it.
SELECT seq, role, body FROM messages
WHERE transcript = :transcript AND seq >= (SELECT max(seq) FROM messages
                                           WHERE transcript = :transcript AND seq >= :first AND role = 'assistant')
ORDER BY seq LIMIT 1000;

-- name: last_seq
SELECT coalesce(max(seq), 0) AS last_seq FROM messages WHERE transcript = :transcript;
