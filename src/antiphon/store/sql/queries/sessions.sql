-- Lookups name their columns: reading all forty costs more than finding the row.

-- name: by_key
SELECT s.id, s.key, s.session_id, s.transcript, s.agent_id, s.channel, s.last_channel, s.chat_type, s.send_policy,
       s.transcript AS named_transcript, s.session_id AS named_session_id,
       CAST(:viewer AS TEXT) IS NOT NULL AND EXISTS (SELECT 1 FROM lineage l JOIN sessions a ON a.id = l.ancestor
                                       WHERE l.descendant = s.id AND a.key = :viewer) AS descendant
FROM sessions s WHERE s.key = :key;

-- name: by_session_id
-- A transcript that is no longer current still names the session it belongs to.
SELECT s.id, s.key, s.session_id, s.transcript, s.agent_id, s.channel, s.last_channel, s.chat_type, s.send_policy,
       t.id AS named_transcript, t.session_id AS named_session_id,
       CAST(:viewer AS TEXT) IS NOT NULL AND EXISTS (SELECT 1 FROM lineage l JOIN sessions a ON a.id = l.ancestor
                                       WHERE l.descendant = s.id AND a.key = :viewer) AS descendant
FROM transcripts t JOIN sessions s ON s.key = t.key WHERE t.session_id = :session_id;

-- name: by_label
SELECT s.id, s.key, s.session_id, s.transcript, s.agent_id, s.channel, s.last_channel, s.chat_type, s.send_policy,
       s.transcript AS named_transcript, s.session_id AS named_session_id,
       CAST(:viewer AS TEXT) IS NOT NULL AND EXISTS (SELECT 1 FROM lineage l JOIN sessions a ON a.id = l.ancestor
                                       WHERE l.descendant = s.id AND a.key = :viewer) AS descendant
FROM sessions s WHERE s.label = :label AND s.archived = 0
ORDER BY s.updated_at DESC, s.key LIMIT 1000;

-- name: by_id
SELECT * FROM sessions WHERE id = :id;

-- name: all_columns_by_key
SELECT * FROM sessions WHERE key = :key;

-- name: key_by_id
SELECT key, session_id FROM sessions WHERE id = :id;

-- name: last_activity
SELECT updated_at, last_seq FROM sessions WHERE id = :id;

-- name: has_unsettled_work
-- A row if the session has unsettled tasks or exchanges, although no run is active.
SELECT 1 AS awaits FROM tasks WHERE requester = :id AND phase <> 'settled'
UNION ALL
SELECT 1 FROM exchanges WHERE requester = :id AND settled_at IS NULL
UNION ALL
SELECT 1 FROM exchanges WHERE target = :id AND settled_at IS NULL
LIMIT 1;

-- name: list_row
-- The same columns as a row of a list.
SELECT s.id, s.key, s.kind, s.channel, s.agent_id, s.session_id, s.updated_at, s.state, s.display_name, s.label,
       s.model, s.last_model, s.context_tokens, s.total_tokens, s.thinking, s.verbose, s.system_sent,
       s.aborted_last_run, s.send_policy, s.last_channel, s.last_to, s.last_account, s.last_thread,
       s.parent_key, s.children, s.chat_type, s.subject, s.input_tokens, s.output_tokens, s.created_at, s.archived,
       s.sandboxed
FROM sessions s WHERE s.id = :id;

-- name: insert_transcript
INSERT INTO transcripts (session_id, key, reason, started_at) VALUES (:session_id, :key, :reason, :now) RETURNING id;

-- name: end_transcript
UPDATE transcripts SET ended_at = :now WHERE id = :transcript;

-- name: transcripts_of
SELECT id, session_id, reason, started_at, ended_at FROM transcripts WHERE key = :key ORDER BY id DESC LIMIT 200;

-- name: insert
INSERT INTO sessions (key, session_id, transcript, agent_id, kind, chat_type, channel, label, display_name,
                      spawned_by, parent_key, root_key, depth, role, sandboxed, envelope, model, thinking,
                      created_at, updated_at)
VALUES (:key, :session_id, :transcript, :agent_id, :kind, :chat_type, :channel, :label, :display_name,
        :spawned_by, :parent_key, :root_key, :depth, :role, :sandboxed, :envelope, :model, :thinking,
        :now, :now)
RETURNING *;

-- name: set_imported_columns
-- Columns that an import sets in addition to the transcript.
UPDATE sessions SET label = :label, display_name = :display_name, subject = :subject, channel = :channel,
       chat_type = :chat_type, last_channel = :last_channel, last_to = :last_to, last_account = :last_account,
       last_thread = :last_thread, model = :model, last_model = :last_model, thinking = :thinking, "verbose" = :verbose,
       send_policy = :send_policy, system_sent = :system_sent, aborted_last_run = :aborted_last_run,
       input_tokens = :input_tokens, output_tokens = :output_tokens, total_tokens = :total_tokens,
       context_tokens = :context_tokens, extra = :extra, updated_at = :updated_at
WHERE id = :id;

-- name: record_channel
-- The channel of a person's first message. It never replaces a recorded one.
UPDATE sessions SET last_channel = :channel, last_to = :to WHERE id = :id AND channel IS NULL AND last_channel IS NULL;

-- name: patch
UPDATE sessions SET label = :label, display_name = :display_name, model = :model, thinking = :thinking,
       "verbose" = :verbose, send_policy = :send_policy, archived = :archived,
       archived_at = CASE WHEN :archived = 1 THEN coalesce(archived_at, :now) END, updated_at = :now
WHERE id = :id;

-- name: label_holder
SELECT id, key FROM sessions
WHERE label = :label AND agent_id = :agent_id AND archived = 0 AND id <> :besides LIMIT 1;

-- name: set_parent
UPDATE sessions SET spawned_by = :parent, parent_key = :parent_key, root_key = :root_key, depth = :depth
WHERE id = :id;

-- name: count_child
UPDATE sessions SET children = children + :change WHERE id = :parent;

-- name: insert_lineage
INSERT INTO lineage (ancestor, descendant)
SELECT ancestor, CAST(:child AS BIGINT) FROM lineage WHERE descendant = :parent
UNION ALL SELECT CAST(:parent AS BIGINT), CAST(:child AS BIGINT);

-- name: insert_names
INSERT INTO session_names (rowid, names) VALUES (:id, /*lite*/ :names /*pg: :vector */);

-- name: delete_names
DELETE FROM session_names WHERE rowid = :id;

-- name: reserve_seq
-- Reserves `count` sequence numbers; only the owner of the current epoch may.
UPDATE sessions SET last_seq = last_seq + :count, updated_at = :now
WHERE id = :id AND lane_epoch = :epoch RETURNING last_seq;

-- name: reserve_seq_unfenced
-- For entries that belong to no run (imports, injected notices).
UPDATE sessions SET last_seq = last_seq + :count, updated_at = :now WHERE id = :id RETURNING last_seq, transcript;

-- name: claim_lane
UPDATE sessions SET lane_epoch = lane_epoch + 1, state = 'running', updated_at = :now,
       last_seq = last_seq + :count, archived = 0, archived_at = NULL
WHERE id = :id
RETURNING lane_epoch, last_seq, transcript, key, session_id, coalesce(root_key, key) AS root_key, agent_id, sandboxed,
          model, thinking, envelope;

-- name: release_lane
UPDATE sessions SET last_seq = last_seq + :count, updated_at = :now, state = 'idle', aborted_last_run = :aborted
WHERE id = :id AND lane_epoch = :epoch RETURNING last_seq;

-- name: release_and_claim_lane
-- `release_lane`, then `claim_lane` for a run that has not started yet.
UPDATE sessions SET lane_epoch = lane_epoch + 1, last_seq = last_seq + :count + 1, updated_at = :now,
       aborted_last_run = :aborted
WHERE id = :id AND lane_epoch = :epoch
RETURNING lane_epoch, last_seq, transcript, key, session_id, coalesce(root_key, key) AS root_key, agent_id, sandboxed,
          model, thinking, envelope;

-- name: revoke_lane
-- Ends the run on behalf of another process: the epoch increases, so later writes of its owner are refused.
UPDATE sessions SET lane_epoch = lane_epoch + 1, last_seq = last_seq + :count, updated_at = :now, state = 'idle',
       aborted_last_run = :aborted
WHERE id = :id RETURNING last_seq;

-- name: add_usage
UPDATE sessions SET input_tokens = input_tokens + :input, output_tokens = output_tokens + :output,
       total_tokens = total_tokens + :total, context_tokens = :context, last_model = :model, system_sent = 1
WHERE id = :id;

-- name: add_tool_usage
-- A call that a tool made; the session's context and its last model stay what they are.
UPDATE sessions SET input_tokens = input_tokens + :input, output_tokens = output_tokens + :output,
       total_tokens = total_tokens + :total
WHERE id = :id;

-- name: clear_context
-- The model's context has changed; its size is known after the next answer.
UPDATE sessions SET context_tokens = NULL WHERE id = :id;

-- name: start_conversation
-- A new conversation under the same key.
UPDATE sessions SET session_id = :session_id, transcript = :transcript, last_seq = 0, lane_epoch = lane_epoch + 1,
       input_tokens = 0, output_tokens = 0, total_tokens = 0, context_tokens = NULL, system_sent = 0,
       aborted_last_run = 0, updated_at = :now
WHERE id = :id;

-- name: restore_conversation
-- Back to an older conversation of the key. Its counters are computed from the usage ledger.
UPDATE sessions SET session_id = :session_id, transcript = :transcript, lane_epoch = lane_epoch + 1, updated_at = :now,
       last_seq = (SELECT coalesce(max(seq), 0) FROM messages WHERE messages.transcript = :transcript),
       input_tokens = (SELECT coalesce(sum(input), 0) FROM usage WHERE session_key = sessions.key AND usage.session_id = :session_id),
       output_tokens = (SELECT coalesce(sum(output), 0) FROM usage WHERE session_key = sessions.key AND usage.session_id = :session_id),
       total_tokens = (SELECT coalesce(sum(input + output + cache_read + cache_write), 0)
                       FROM usage WHERE session_key = sessions.key AND usage.session_id = :session_id),
       context_tokens = NULL, system_sent = 1, aborted_last_run = 0
WHERE id = :id;

-- name: reopen_transcript
UPDATE transcripts SET ended_at = NULL WHERE id = :transcript;

-- name: unused
SELECT id, key, session_id FROM sessions
WHERE archived = 0 AND kind = :kind AND updated_at < :before AND state = 'idle'
  AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.session = sessions.id AND r.state = 'queued')
ORDER BY updated_at LIMIT :limit;

-- name: archive
UPDATE sessions SET archived = 1, archived_at = :now WHERE id = :id AND archived = 0;

-- name: expired
-- A session is archived after its last use, so the index on `updated_at` bounds this too.
SELECT id, key, session_id FROM sessions
WHERE archived = 1 AND kind = :kind AND updated_at < :before AND archived_at < :before AND state = 'idle'
  AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.session = sessions.id AND r.state = 'queued')
ORDER BY updated_at LIMIT :limit;

-- name: running_or_queued
-- The running run of a session, else a queued one. Notes do not count: they record what has already happened.
SELECT id, 1 AS running FROM runs WHERE session = :id AND state = 'running'
UNION ALL
SELECT id, 0 FROM runs WHERE session = :id AND state = 'queued' AND origin <> 'note'
ORDER BY running DESC LIMIT 1;

-- name: delete_messages
DELETE FROM messages WHERE transcript IN (SELECT id FROM transcripts WHERE key = :key);

-- name: record_deletion
-- Stored among the commands, whose ids outlive their subjects. No other command has an empty digest.
INSERT INTO commands (id, digest, answer, created_at)
SELECT :prefix || key || ' ' || session_id, '', session_id, CAST(:now AS BIGINT) FROM transcripts WHERE key = :key
ON CONFLICT (id) DO UPDATE SET digest = excluded.digest, answer = excluded.answer, created_at = excluded.created_at;

-- name: delete_transcripts
DELETE FROM transcripts WHERE key = :key;

-- name: delete_runs
-- Only idle sessions are deleted: all their runs have ended, except for queued notes.
DELETE FROM runs WHERE session = :id AND ended_at IS NOT NULL;

-- name: delete_notes
-- Any other queued run is an accepted message; its reference keeps the session from being deleted.
DELETE FROM runs WHERE session = :id AND state = 'queued' AND origin = 'note';

-- name: delete_lineage
DELETE FROM lineage WHERE ancestor = :id OR descendant = :id;

-- name: delete_session
DELETE FROM sessions WHERE id = :id;
