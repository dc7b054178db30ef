-- name: page
-- The streams below are joined by UNION ALL: the database merges them in order and stops at the limit, so a page
-- costs the same however many sessions there are. They are read from their indexes alone. Only the rows of the page are
-- fetched, as one JSON value, because transferring their columns one by one costs more than finding them. The caller
-- sorts them: sorting here would copy every column.
SELECT coalesce(CAST(/*lite*/ json_group_array(json_array( /*pg: json_agg(json_build_array( */
         s.id, s.key, s.kind, s.channel, s.agent_id, s.session_id, s.updated_at, s.state, s.display_name, s.label,
         s.model, s.last_model, s.context_tokens, s.total_tokens, s.thinking, s.verbose, s.system_sent,
         s.aborted_last_run, s.send_policy, s.last_channel, s.last_to, s.last_account, s.last_thread,
         s.parent_key, s.children, s.chat_type, s.subject, s.input_tokens, s.output_tokens, s.created_at, s.archived,
         s.sandboxed
       )) AS TEXT), '[]') AS page
FROM ({streams} ORDER BY updated_at DESC, key LIMIT :limit) AS p
JOIN sessions s ON s.id = p.id;

-- name: stream
-- SQLite merges the streams as they are; PostgreSQL may collect them first unless each has its own limit.
/*pg: SELECT * FROM ( */ {rows} /*pg: ORDER BY s.updated_at DESC, s.key LIMIT :limit) AS stream */

-- name: of_kind
SELECT s.id, s.updated_at, s.key FROM sessions s WHERE s.archived = :archived_{i} AND s.kind = :kind_{i} AND {filters}

-- name: of_agent
SELECT s.id, s.updated_at, s.key FROM sessions s
WHERE s.agent_id = :agent_{i} AND s.archived = :archived_{i} AND s.kind = :kind_{i} AND {filters}

-- name: of_tree
SELECT s.id, s.updated_at, s.key FROM sessions s
WHERE s.id IN (SELECT l.descendant FROM lineage l JOIN sessions a ON a.id = l.ancestor WHERE a.key = :own_key
               UNION ALL SELECT o.id FROM sessions o WHERE o.key = :own_key)
  AND {filters}

-- name: of_self
SELECT s.id, s.updated_at, s.key FROM sessions s WHERE s.key = :own_key AND {filters}

-- name: of_parent
SELECT s.id, s.updated_at, s.key FROM sessions s
WHERE s.spawned_by = (SELECT id FROM sessions WHERE key = :parent) AND {filters}

-- name: of_label
SELECT s.id, s.updated_at, s.key FROM sessions s WHERE s.label = :label AND {filters}

-- name: of_words
-- The most recently created matches, so that a word in a million sessions does not read a million rows.
SELECT s.id, s.updated_at, s.key FROM sessions s
WHERE s.id IN (SELECT rowid FROM session_names WHERE /*lite*/ session_names MATCH :words /*pg: names @@ :words */ ORDER BY rowid DESC LIMIT :matches)
  AND {filters}

-- name: count_matches
SELECT count(*) AS matches FROM (SELECT 1 FROM session_names WHERE /*lite*/ session_names MATCH :words /*pg: names @@ :words */ LIMIT :most) AS found;

-- name: filter_cursor
s.updated_at <= :cursor_at AND (s.updated_at < :cursor_at OR s.key > :cursor_key)

-- name: filter_agent
s.agent_id = :only_agent

-- name: filter_active
s.updated_at >= :active_since

-- name: filter_label
s.label = :label

-- name: filter_parent
s.spawned_by = (SELECT id FROM sessions WHERE key = :parent)

-- name: filter_words
s.id IN (SELECT rowid FROM session_names WHERE /*lite*/ session_names MATCH :words /*pg: names @@ :words */)

-- name: filter_visible
-- For streams that a filter selected; the others are visible by construction. The agents are one parameter, because
-- the statement repeats this for each stream and there may be thousands of agents.
(s.agent_id IN (SELECT /*lite*/ value FROM json_each(:seen) /*pg: json_array_elements_text(CAST(:seen AS json)) */)
 OR s.key = :own_key
 OR (:descendants = 1 AND s.id IN (SELECT l.descendant FROM lineage l JOIN sessions a ON a.id = l.ancestor
                                   WHERE a.key = :own_key)))

-- name: agent_ids
-- Jumps from one agent to the next through the index instead of reading every session.
WITH RECURSIVE agents (id) AS (
  SELECT min(agent_id) FROM sessions
  UNION ALL
  SELECT (SELECT min(agent_id) FROM sessions WHERE agent_id > agents.id) FROM agents WHERE agents.id IS NOT NULL
)
SELECT id FROM agents WHERE id IS NOT NULL LIMIT :most;

-- name: hidden_of_agent
-- Counts sessions of an agent outside the caller's tree up to `most`, from the index, with one lineage lookup each.
SELECT count(*) AS hidden FROM (
  SELECT 1 FROM sessions s
  WHERE s.agent_id = :agent AND s.archived = 0 AND s.key <> :own_key
    AND NOT (:descendants = 1
             AND EXISTS (SELECT 1 FROM lineage l WHERE l.descendant = s.id
                                                   AND l.ancestor = (SELECT o.id FROM sessions o WHERE o.key = :own_key)))
  LIMIT :most) AS found;

-- name: last_messages
-- The last user and assistant messages of a session. A body longer than `max_bytes` is returned as ''.
SELECT m.seq, m.entry, m.role, CASE WHEN length(m.body) <= :max_bytes THEN m.body ELSE '' END AS body, m.created_at,
       r.id AS run_id
FROM messages m LEFT JOIN runs r ON r.n = m.run
WHERE m.transcript = (SELECT s.transcript FROM sessions s WHERE s.id = :session) AND m.role IN ('user', 'assistant')
ORDER BY m.seq DESC LIMIT :limit;

-- name: count_by_agent
-- Counts every session; for requests by people, not for every request.
SELECT agent_id, count(*) AS sessions FROM sessions WHERE archived = 0 GROUP BY agent_id LIMIT 10000;

-- name: count_active_runs
SELECT (SELECT count(*) FROM runs WHERE state = 'queued' AND session > 0) AS queued,
       (SELECT count(*) FROM runs WHERE state = 'running' AND session > 0) AS running;
