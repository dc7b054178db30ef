-- name: index_position
-- The last indexed message, and the last message.
SELECT /*lite*/ message AS last /*pg: coalesce((SELECT min(message) - 1 FROM unindexed), (SELECT max(id) FROM messages), 0) AS last */,
       (SELECT coalesce(max(id), 0) FROM messages) AS head
FROM search_cursor WHERE id = 1;

-- name: unindexed
-- The next entries to index, with the scope terms that restrict who can find them and where.
SELECT m.id, m.role, m.body,
       's' || s.id || ' a' || /*lite*/ hex(s.agent_id) /*pg: encode(convert_to(s.agent_id, 'UTF8'), 'hex') */ || CASE m.role WHEN 'toolResult' THEN ' tool' ELSE ' said' END
       || coalesce((SELECT ' ' || /*lite*/ group_concat /*pg: string_agg */ ('b' || l.ancestor, ' ') FROM lineage l WHERE l.descendant = s.id), '')
       || ' w' || (m.id / CAST(:block AS BIGINT))
       AS scope
FROM messages m /*pg: JOIN unindexed u ON u.message = m.id */
LEFT JOIN transcripts t ON t.id = m.transcript LEFT JOIN sessions s ON s.key = t.key
WHERE m.id > :after ORDER BY m.id LIMIT :limit;

-- name: insert
INSERT INTO message_words (rowid, words, /*lite*/ scope /*pg: vector */) VALUES (:id, :words, /*lite*/ :scope /*pg: :vector */);

-- name: advance
/*lite*/ UPDATE search_cursor SET message = :message WHERE id = 1
/*pg: DELETE FROM unindexed WHERE message <= :message */;

-- name: delete_of_session
-- On PostgreSQL the pending index entries are deleted too, so a concurrent indexer conflicts and starts again.
/*pg: WITH notes AS (DELETE FROM unindexed WHERE message IN
  (SELECT m.id FROM transcripts t JOIN messages m ON m.transcript = t.id WHERE t.key = :key)) */
DELETE FROM message_words
WHERE rowid IN (SELECT m.id FROM transcripts t JOIN messages m ON m.transcript = t.id WHERE t.key = :key);

-- name: find
-- Newest first from the index, which stops at the limit; only returned rows are looked up.
SELECT m.id, m.entry, m.seq, m.role, m.created_at, t.session_id, s.key, s.agent_id, f.words,
       CAST(:viewer AS TEXT) IS NOT NULL AND EXISTS (SELECT 1 FROM lineage l JOIN sessions a ON a.id = l.ancestor
                                       WHERE l.descendant = s.id AND a.key = :viewer) AS descendant
FROM (SELECT rowid AS id, words FROM message_words
      WHERE /*lite*/ message_words MATCH :match /*pg: vector @@ :match */ AND rowid > :after AND rowid <= :upto ORDER BY rowid DESC LIMIT :limit) AS f
JOIN messages m ON m.id = f.id JOIN transcripts t ON t.id = m.transcript JOIN sessions s ON s.key = t.key
ORDER BY f.id DESC;

-- name: completions
-- Jumps from one term to the next: no term contains the character 1, so nothing lies between a term and the term
-- with that appended. PostgreSQL's index matches prefixes itself, so there this reports too many completions.
/*lite*/
WITH RECURSIVE found (term) AS (
  SELECT (SELECT v.term FROM message_words_terms v WHERE v.term >= :least AND v.term < :most LIMIT 1)
  UNION ALL
  SELECT (SELECT v.term FROM message_words_terms v WHERE v.term >= found.term || char(1) AND v.term < :most LIMIT 1)
  FROM found WHERE found.term IS NOT NULL
)
SELECT term FROM found WHERE term IS NOT NULL LIMIT :limit
/*pg: SELECT CAST(:least AS TEXT) || i AS term FROM generate_series(1, CAST(:limit AS INTEGER)) AS i */;
