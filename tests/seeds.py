"""What the five documents that Antiphon grew from say a session tool does, sentence by sentence, in our own words.

A sentence names the documents that state it and the contract lines that carry it. `EXPLICIT` are details that a test
of a whole contract line misses easily: a test names each of them itself. `DIVERGENCES` are those where we do
otherwise on purpose, and why; a test names each of them, too. `test_requirements.py` holds all of this together.
"""

from __future__ import annotations

from typing import NamedTuple

SYSTEMS = {"000": "Equabot", "001": "Clawdis", "002": "Clawdbot", "003": "Pllan", "004": "ZERO"}
"""The documents, by the number that leads the file's name, and the system each describes."""

ALL = tuple(SYSTEMS)
SPAWNING = ("000", "002", "003", "004")
"""All but the oldest, which knows neither spawning nor conversations between agents."""
BEFORE_TREES = ("000", "002", "004")
"""Those that know spawning, but neither `thinking`, `thread`, attachments nor visibility beyond the sandbox."""


class Sentence(NamedTuple):
    id: str
    """Begins with the number of a document that states it: 003, the base, if that does."""
    seeds: tuple[str, ...]
    text: str
    contract: tuple[str, ...]

    @property
    def source(self) -> str:
        return ", ".join(f"seed {number} ({SYSTEMS[number]})" for number in self.seeds)


TOOLS = (
    Sentence(
        "003-tool-names",
        ALL,
        "There are sessions_list, sessions_history and sessions_send.",
        ("L1", "H1", "S1"),
    ),
    Sentence("003-tool-name-spawn", SPAWNING, "There is sessions_spawn.", ("P1",)),
)

KEYS = (
    Sentence("003-key-main", ALL, "The bucket of direct chats is written `main`.", ("K2", "K7")),
    Sentence("003-key-main-is-own", SPAWNING, "`main` is the calling agent's own main session.", ("K2",)),
    Sentence(
        "003-key-group",
        SPAWNING,
        "Groups and channels have `agent:<agentId>:<channel>:group|channel:<id>`, given in full.",
        ("K1", "K2"),
    ),
    Sentence(
        "001-key-surface", ("001",), "Groups have `<surface>:group:<id>`, `<surface>:channel:<id>`.", ("K4",)
    ),
    Sentence("003-key-cron", ALL, "A scheduled job's session is `cron:<job id>`.", ("K1", "K2")),
    Sentence(
        "003-key-hook", ALL, "A hook's session is `hook:<uuid>`, or the key that was chosen.", ("K1", "K2")
    ),
    Sentence(
        "003-key-node", ALL, "A node's session is `node-<node id>`, or the key that was chosen.", ("K1", "K2")
    ),
    Sentence("003-key-reserved", ALL, "No list shows `global` or `unknown`; both are reserved.", ("K3",)),
    Sentence(
        "003-key-global-is-main",
        ALL,
        "With `session.scope` `global`, every tool says and takes `main`; a caller never meets `global`.",
        ("K3",),
    ),
)

LIST = (
    Sentence("003-list-rows", ALL, "sessions_list answers with an array of rows.", ("L3",)),
    Sentence("003-list-kinds", ALL, "`kinds` keeps main, group, cron, hook, node, other.", ("L1", "K6")),
    Sentence("003-list-limit", ALL, "`limit` has a default and is clamped, to 200.", ("L1",)),
    Sentence("003-list-active-minutes", ALL, "`activeMinutes` keeps what changed that recently.", ("L1",)),
    Sentence("003-list-message-limit", ALL, "`messageLimit`, 0 unless given, adds the last N.", ("L1", "L2")),
    Sentence(
        "003-list-filters-together",
        ALL,
        "`kinds`, `limit`, `activeMinutes` and `messageLimit` work in one call.",
        ("L1", "L2"),
    ),
    Sentence(
        "003-list-messages-are-history",
        ALL,
        "The messages of a row are the newest of what `chat.history` has for that session.",
        ("L2",),
    ),
    Sentence(
        "003-list-no-tool-results",
        ALL,
        "Messages in a list never include tool results; sessions_history has those.",
        ("L2", "H2"),
    ),
)

ROW = (
    Sentence("003-row-key", ALL, "A row has `key`, as text.", ("L3",)),
    Sentence("003-row-kind", ALL, "A row has `kind`, one of the six.", ("L3", "K6")),
    Sentence(
        "003-row-channel",
        SPAWNING,
        "A row has `channel`: whatsapp, telegram, discord, signal, imessage, webchat, internal or unknown.",
        ("L3", "K6"),
    ),
    Sentence(
        "001-row-provider", ("001",), "A row has `provider`, with the values of `channel`.", ("L3", "K6")
    ),
    Sentence("003-row-display-name", ALL, "A row has `displayName`: a group's title, where known.", ("L3",)),
    Sentence("003-row-updated-at", ALL, "A row has `updatedAt`, in milliseconds.", ("L3",)),
    Sentence("003-row-session-id", ALL, "A row has `sessionId`.", ("L3",)),
    Sentence("003-row-model", ALL, "A row has `model`, `contextTokens`, `totalTokens`.", ("L3",)),
    Sentence(
        "003-row-levels",
        ALL,
        "A row has `thinkingLevel`, `verboseLevel`, `systemSent` and `abortedLastRun`.",
        ("L3",),
    ),
    Sentence("003-row-send-policy", ALL, "A row has `sendPolicy` if the session has its own.", ("L3", "D2")),
    Sentence("003-row-last-route", ALL, "A row has `lastChannel` and `lastTo`.", ("L3",)),
    Sentence(
        "003-row-delivery-context",
        SPAWNING,
        "A row has `deliveryContext`: `channel`, `to` and `accountId` in one normal form, where known.",
        ("L3",),
    ),
    Sentence(
        "003-row-transcript-path",
        ALL,
        "A row has `transcriptPath`: where the transcript would lie, from store directory and sessionId.",
        ("L3", "L4"),
    ),
    Sentence(
        "003-row-messages", ALL, "A row has `messages` only if `messageLimit` asks for some.", ("L2", "L3")
    ),
)

CHANNEL = (
    Sentence("003-channel-group", SPAWNING, "A group's `channel` is the one on its record.", ("K6",)),
    Sentence("003-channel-direct", SPAWNING, "A direct chat's `channel` follows `lastChannel`.", ("K6",)),
    Sentence(
        "003-channel-internal", SPAWNING, "The `channel` of cron, hook and node is `internal`.", ("K6",)
    ),
    Sentence("003-channel-unknown", SPAWNING, "Where there is no `channel` it is `unknown`.", ("K6",)),
    Sentence(
        "001-provider-as-channel",
        ("001",),
        "`provider` follows the same four rules, from the surface on a group's record.",
        ("L3", "K6"),
    ),
)

HISTORY = (
    Sentence("003-history-session", ALL, "sessions_history reads the one session it must name.", ("H1",)),
    Sentence(
        "003-history-session-id", SPAWNING, "sessions_history takes a sessionId of a list, too.", ("H1", "K2")
    ),
    Sentence("003-history-limit", ALL, "The server clamps the `limit` of a history.", ("H1",)),
    Sentence("003-history-include-tools", ALL, "`includeTools` is false unless given.", ("H1",)),
    Sentence(
        "003-history-no-tool-results", ALL, "Without `includeTools`, no `toolResult` is included.", ("H2",)
    ),
    Sentence(
        "003-history-raw", ALL, "A history's messages have the shape they have in the transcript.", ("H2",)
    ),
    Sentence(
        "003-history-id-resolves",
        SPAWNING,
        "A sessionId stands for its session's key; one that does not exist is an error.",
        ("H5", "K2"),
    ),
)

LIVE = (
    Sentence(
        "003-live-direct",
        ("003",),
        "Clients may use history and live transcripts of the gateway directly.",
        ("W2", "W4"),
    ),
    Sentence(
        "003-http-history", ("003",), "`GET /sessions/{sessionKey}/history` is history over HTTP.", ("W4",)
    ),
    Sentence(
        "003-http-history-parameters",
        ("003",),
        "History over HTTP takes `limit`, `cursor`, `includeTools=1` and `follow=1`.",
        ("W4",),
    ),
    Sentence(
        "003-http-history-unknown",
        ("003",),
        "History over HTTP of an unknown session: 404, with `error.type` `not_found`.",
        ("W4",),
    ),
    Sentence(
        "003-http-history-follow",
        ("003",),
        "History over HTTP with `follow=1` is an SSE stream of what is appended.",
        ("W4",),
    ),
    Sentence(
        "003-subscribe-sessions",
        ("003",),
        "`sessions.subscribe`: lifecycle and transcript events of every session the client may see.",
        ("W2", "W3"),
    ),
    Sentence(
        "003-subscribe-messages",
        ("003",),
        "`sessions.messages.subscribe {key}`: the `session.message` events of that session, no others.",
        ("W2", "W3"),
    ),
    Sentence(
        "003-unsubscribe-messages",
        ("003",),
        "`sessions.messages.unsubscribe {key}` ends that one subscription.",
        ("W2", "W3"),
    ),
    Sentence(
        "003-event-session-message",
        ("003",),
        "`session.message` has the entry that was appended, and usage as it stands, where known.",
        ("W3",),
    ),
    Sentence(
        "003-event-sessions-changed",
        ("003",),
        "`sessions.changed` says `phase: message` on an append, so that lists refresh.",
        ("W3",),
    ),
)

SEND = (
    Sentence("003-send-required", ALL, "sessions_send needs `sessionKey` and `message`.", ("S1",)),
    Sentence(
        "003-send-session-id", SPAWNING, "sessions_send takes a sessionId of a list, too.", ("S1", "K2")
    ),
    Sentence("003-send-timeout-default", ALL, "sessions_send waits unless told otherwise.", ("S1",)),
    Sentence(
        "003-send-timeout-zero",
        ALL,
        "`timeoutSeconds: 0` only enqueues: `{runId, status: accepted}`.",
        ("S1", "S2"),
    ),
    Sentence(
        "003-send-reply",
        ALL,
        "`timeoutSeconds` above 0 waits at most that long: `{runId, status: ok, reply}`.",
        ("S1", "S2"),
    ),
    Sentence("003-send-timeout", ALL, "No answer in time: `{runId, status: timeout, error}`.", ("S2",)),
    Sentence(
        "003-send-timeout-goes-on",
        ALL,
        "After a timeout the run goes on, and sessions_history has its answer later.",
        ("S2", "S4"),
    ),
    Sentence("003-send-run-failed", ALL, "A failed run: `{runId, status: error, error}`.", ("S2",)),
    Sentence(
        "003-send-announce-afterwards",
        SPAWNING,
        "The announce comes after the primary run, and its delivery may fail.",
        ("S6",),
    ),
    Sentence(
        "003-send-ok-is-no-announce", SPAWNING, "`status: ok` promises nothing about the announce.", ("S2",)
    ),
    Sentence(
        "003-send-wait-on-server",
        SPAWNING,
        "The wait is the gateway's `agent.wait`: who reconnects has not lost it.",
        ("S4",),
    ),
    Sentence("003-send-context", SPAWNING, "The primary run is told that an agent asks.", ("S3",)),
    Sentence(
        "003-send-provenance",
        ("003",),
        "The stored message says `provenance.kind: inter_session`: no reader takes it for a user's.",
        ("S3",),
    ),
    Sentence("003-reply-back", SPAWNING, "Reply-back turns follow the primary run.", ("S5",)),
    Sentence("003-reply-back-alternates", SPAWNING, "From round 2 requester and target alternate.", ("S5",)),
    Sentence("003-reply-back-skip", SPAWNING, "Exactly `REPLY_SKIP` ends reply-back.", ("S5",)),
    Sentence(
        "003-reply-back-limit",
        SPAWNING,
        "Reply-back takes at most `session.agentToAgent.maxPingPongTurns`: 0 to 5, 5 unless set.",
        ("S5",),
    ),
    Sentence(
        "003-send-announce",
        SPAWNING,
        "After reply-back the target, and no other agent, takes the announce step.",
        ("S6",),
    ),
    Sentence(
        "003-send-announce-skip",
        SPAWNING,
        "Exactly `ANNOUNCE_SKIP` in the announce step of a send is silence.",
        ("S6",),
    ),
    Sentence(
        "003-send-announce-posted",
        ("000", "002", "003"),
        "What else the announce step of a send answers goes to the target's channel.",
        ("S6",),
    ),
    Sentence(
        "004-send-announce-selected",
        ("004",),
        "What else the announce step of a send answers goes to the channel selected.",
        ("S6",),
    ),
    Sentence(
        "003-send-announce-sees",
        SPAWNING,
        "The announce step of a send sees the request, the reply of round 1 and the latest reply.",
        ("S6",),
    ),
)

POLICY = (
    Sentence(
        "003-policy-matches",
        SPAWNING,
        "Sending is blocked by channel and chat type, never by session id.",
        ("D1",),
    ),
    Sentence(
        "001-policy-surface",
        ("001",),
        "A rule matches by `surface` and chat type, never by session id.",
        ("D1",),
    ),
    Sentence(
        "000-policy-rules",
        ("000", "001", "002", "004"),
        "`session.sendPolicy` is `rules` of `match` and `action`, and a `default`.",
        ("D1",),
    ),
    Sentence("003-policy-override", ALL, "A session's own `allow` or `deny`; unset inherits.", ("D1", "D2")),
    Sentence("003-policy-patch", ALL, "`sessions.patch` sets a session's own policy.", ("D2",)),
    Sentence(
        "003-policy-command",
        ALL,
        "`/send on|off|inherit`, of the owner only, sets a session's own policy.",
        ("D2",),
    ),
    Sentence("003-policy-command-alone", SPAWNING, "`/send` is a message by itself.", ("D2",)),
    Sentence("003-policy-gateway", ALL, "The policy holds at `chat.send` and `agent`.", ("D3", "S8")),
    Sentence("003-policy-replies", ALL, "The policy holds where replies go out by themselves.", ("D3",)),
)

SPAWN = (
    Sentence(
        "003-spawn-isolated",
        SPAWNING,
        "sessions_spawn runs a sub-agent in a session apart and announces to the requester's chat.",
        ("P3", "P4"),
    ),
    Sentence("003-spawn-task", SPAWNING, "`task` is required.", ("P1",)),
    Sentence("003-spawn-label", SPAWNING, "`label` names it for logs and pages.", ("P1",)),
    Sentence("003-spawn-agent", SPAWNING, "`agentId`: under another agent, if allowed.", ("P1", "P2")),
    Sentence("003-spawn-model", SPAWNING, "`model` is what the sub-agent uses.", ("P1",)),
    Sentence("003-spawn-model-invalid", SPAWNING, "A `model` that is not valid is an error.", ("P2",)),
    Sentence("003-spawn-thinking", ("003",), "`thinking` is the level of the sub-agent's run.", ("P1",)),
    Sentence("003-spawn-timeout", SPAWNING, "`runTimeoutSeconds` aborts the run after so long.", ("P6",)),
    Sentence(
        "000-spawn-timeout-default", BEFORE_TREES, "`runTimeoutSeconds` left out is 0: no limit.", ("P1",)
    ),
    Sentence(
        "003-spawn-timeout-config",
        ("003",),
        "`runTimeoutSeconds` left out is `agents.defaults.subagents.runTimeoutSeconds`, or else 0.",
        ("P1", "P6"),
    ),
    Sentence(
        "003-spawn-thread",
        ("003",),
        "`thread`, false unless given, asks for a thread where the channel has them.",
        ("P1", "P2"),
    ),
    Sentence(
        "003-spawn-mode", ("003",), "`mode` is `run` unless given, or with `thread`: `session`.", ("P1",)
    ),
    Sentence(
        "003-spawn-mode-session", ("003",), "`mode: session` without `thread` is refused.", ("P1", "P2")
    ),
    Sentence("003-spawn-cleanup", SPAWNING, "`cleanup` is `keep` unless it says `delete`.", ("P1", "P7")),
    Sentence("003-spawn-sandbox", ("003",), "`sandbox` is `inherit` unless it says `require`.", ("P1", "P8")),
    Sentence(
        "003-spawn-sandbox-require",
        ("003",),
        "`sandbox: require` refuses a child that would not be sandboxed.",
        ("P8",),
    ),
    Sentence(
        "003-spawn-attachments",
        ("003",),
        "`attachments`: `{name, content, encoding?: utf8|base64, mimeType?}`, given inline.",
        ("P9",),
    ),
    Sentence("003-spawn-attachments-acp", ("003",), "The ACP runtime refuses attachments.", ("P9",)),
    Sentence(
        "003-spawn-attachments-place",
        ("003",),
        "Attachments become files under `.pllan/attachments/<uuid>/` of the child's workspace.",
        ("P9",),
    ),
    Sentence(
        "003-spawn-attachments-receipt",
        ("003",),
        "The receipt of attachments has each file's sha256.",
        ("P9",),
    ),
    Sentence("003-spawn-attach-as", ("003",), "`attachAs {mountPath?}` is a hint kept for later.", ("P9",)),
    Sentence(
        "003-spawn-allow",
        SPAWNING,
        "`agents.list[].subagents.allowAgents` lists the ids that `agentId` may name.",
        ("P2",),
    ),
    Sentence("003-spawn-allow-any", SPAWNING, '`["*"]` in `allowAgents` is any agent.', ("P2",)),
    Sentence(
        "003-spawn-allow-default", SPAWNING, "Without `allowAgents`, only the requester's own agent.", ("P2",)
    ),
    Sentence("003-spawn-agents-list", SPAWNING, "agents_list tells which ids a spawn may name.", ("A1",)),
    Sentence("003-spawn-guard", ("003",), "A sandboxed requester cannot have a child that is not.", ("P8",)),
    Sentence(
        "003-spawn-child",
        SPAWNING,
        "The child is `agent:<agentId>:subagent:<uuid>`, with `deliver: false`.",
        ("P3", "K1"),
    ),
    Sentence("003-spawn-tools", SPAWNING, "A child has every tool but the session tools.", ("P3",)),
    Sentence(
        "003-spawn-tools-config",
        SPAWNING,
        "`tools.subagents.tools` changes which tools a child has.",
        ("P3",),
    ),
    Sentence("003-spawn-no-nesting", SPAWNING, "A sub-agent may not spawn.", ("P2",)),
    Sentence(
        "003-spawn-at-once",
        SPAWNING,
        "A spawn never waits: `{status: accepted, runId, childSessionKey}` at once.",
        ("P2",),
    ),
    Sentence(
        "003-spawn-thread-bound",
        ("003",),
        "With a thread, a channel binds delivery and routing to it.",
        ("P10",),
    ),
    Sentence(
        "003-spawn-thread-config",
        ("003",),
        "`session.threadBindings` and `channels.discord.threadBindings` govern threads on Discord.",
        ("P10", "C"),
    ),
)

ANNOUNCE = (
    Sentence(
        "003-announce",
        SPAWNING,
        "A child that is done takes an announce step; the result is posted to the requester's chat.",
        ("P4",),
    ),
    Sentence(
        "003-announce-empty",
        ("003",),
        "If the child's last reply is empty, `Result` is its latest `toolResult`.",
        ("P4",),
    ),
    Sentence(
        "003-announce-skip",
        SPAWNING,
        "Exactly `ANNOUNCE_SKIP` in the announce step of a child is silence.",
        ("P4",),
    ),
    Sentence(
        "003-announce-labels",
        ("000", "002", "003"),
        "An announce is brought into the form `Status`, `Result` and `Notes`.",
        ("P4",),
    ),
    Sentence(
        "004-announce-labels",
        ("004",),
        "An announce is brought into the form `Status`, `Resultado` and `Notas`.",
        ("P4",),
    ),
    Sentence(
        "003-announce-status", SPAWNING, "`Status` is how the run ended, not the model's word.", ("P4",)
    ),
    Sentence(
        "003-announce-stats",
        SPAWNING,
        "An announce has a line with run time, tokens, session key and id, transcript path, and cost if known.",
        ("P4",),
    ),
    Sentence(
        "003-archive",
        SPAWNING,
        "`agents.defaults.subagents.archiveAfterMinutes`, 60 unless set, archives the child.",
        ("P7",),
    ),
)

VISIBILITY = (
    Sentence(
        "003-visibility-default", ("003",), "`tools.sessions.visibility` is `tree` unless set.", ("V1",)
    ),
    Sentence("003-visibility-self", ("003",), "`self` is the session itself.", ("V1",)),
    Sentence("003-visibility-tree", ("003",), "`tree` is the session itself and those it spawned.", ("V1",)),
    Sentence("003-visibility-agent", ("003",), "`agent` is every session of its agent.", ("V1",)),
    Sentence(
        "003-visibility-all",
        ("003",),
        "`all` is every session; those of other agents need `tools.agentToAgent`, too.",
        ("V1",),
    ),
    Sentence(
        "000-sandbox-has-tools", BEFORE_TREES, "A sandboxed session may use the session tools.", ("V2",)
    ),
    Sentence(
        "003-sandbox-spawned",
        SPAWNING,
        "The session tools of a sandboxed session see only what it spawned, unless set otherwise.",
        ("V2",),
    ),
    Sentence(
        "000-sandbox-setting",
        BEFORE_TREES,
        "`agents.defaults.sandbox.sessionToolsVisibility` is `spawned`, or `all`.",
        ("V2", "C"),
    ),
    Sentence(
        "003-sandbox-clamp",
        ("003",),
        "`spawned` clamps a sandboxed session to `tree`, even where visibility is `all`.",
        ("V2",),
    ),
)

SEEDS: tuple[Sentence, ...] = (
    *TOOLS,
    *KEYS,
    *LIST,
    *ROW,
    *CHANNEL,
    *HISTORY,
    *LIVE,
    *SEND,
    *POLICY,
    *SPAWN,
    *ANNOUNCE,
    *VISIBILITY,
)

EXPLICIT: dict[str, tuple[str, ...]] = {
    "keys": (
        "003-key-main-is-own",
        "001-key-surface",
        "003-key-cron",
        "003-key-hook",
        "003-key-node",
        "003-key-reserved",
        "003-key-global-is-main",
    ),
    "session ids": ("003-history-session-id", "003-history-id-resolves", "003-send-session-id"),
    "lists": (
        "003-list-limit",
        "003-list-message-limit",
        "003-list-filters-together",
        "003-list-messages-are-history",
        "003-list-no-tool-results",
        "003-row-channel",
        "003-row-delivery-context",
        "003-row-send-policy",
        "001-row-provider",
        "001-provider-as-channel",
    ),
    "histories": ("003-history-no-tool-results", "003-history-raw"),
    "live transcripts": (
        "003-http-history-parameters",
        "003-http-history-unknown",
        "003-http-history-follow",
        "003-subscribe-sessions",
        "003-subscribe-messages",
        "003-unsubscribe-messages",
        "003-event-session-message",
        "003-event-sessions-changed",
    ),
    "sends": (
        "003-send-required",
        "003-send-timeout-zero",
        "003-send-reply",
        "003-send-timeout",
        "003-send-timeout-goes-on",
        "003-send-run-failed",
        "003-send-ok-is-no-announce",
        "003-send-wait-on-server",
        "003-send-context",
        "003-send-provenance",
    ),
    "reply-back": ("003-reply-back-alternates", "003-reply-back-skip", "003-reply-back-limit"),
    "announces of sends": (
        "003-send-announce",
        "003-send-announce-skip",
        "003-send-announce-posted",
        "004-send-announce-selected",
        "003-send-announce-sees",
    ),
    "send policy": (
        "001-policy-surface",
        "003-policy-override",
        "003-policy-command",
        "003-policy-command-alone",
        "003-policy-gateway",
        "003-policy-replies",
    ),
    "spawns": (
        "003-spawn-model-invalid",
        "003-spawn-thinking",
        "003-spawn-timeout",
        "000-spawn-timeout-default",
        "003-spawn-timeout-config",
        "003-spawn-cleanup",
        "003-spawn-at-once",
    ),
    "threads and modes": (
        "003-spawn-thread",
        "003-spawn-mode",
        "003-spawn-mode-session",
        "003-spawn-thread-bound",
        "003-spawn-thread-config",
    ),
    "who may be spawned": (
        "003-spawn-allow",
        "003-spawn-allow-any",
        "003-spawn-allow-default",
        "003-spawn-agents-list",
        "003-spawn-no-nesting",
    ),
    "tools of a child": ("003-spawn-child", "003-spawn-tools", "003-spawn-tools-config"),
    "attachments": (
        "003-spawn-attachments",
        "003-spawn-attachments-acp",
        "003-spawn-attachments-place",
        "003-spawn-attachments-receipt",
        "003-spawn-attach-as",
    ),
    "announces of spawns": (
        "003-announce",
        "003-announce-empty",
        "003-announce-skip",
        "003-announce-labels",
        "004-announce-labels",
        "003-announce-status",
        "003-announce-stats",
        "003-archive",
    ),
    "visibility": (
        "003-visibility-default",
        "003-visibility-self",
        "003-visibility-tree",
        "003-visibility-agent",
        "003-visibility-all",
    ),
    "sandboxes": (
        "000-sandbox-has-tools",
        "003-sandbox-spawned",
        "000-sandbox-setting",
        "003-sandbox-clamp",
        "003-spawn-sandbox",
        "003-spawn-sandbox-require",
        "003-spawn-guard",
    ),
}
"""By topic, the sentences that a test names itself."""

DIVERGENCES: dict[str, str] = {
    "001-key-surface": "Accepted; stored and shown in the canonical form, with its agent.",
    "003-row-channel": "A channel that the documents do not know yet appears under its own name.",
    "001-row-provider": "Always there, and equal to `channel`.",
    "003-list-message-limit": "At most 20 a row and 64 KiB a list, and what was cut is said: a list must fit a prompt.",
    "003-history-raw": "Long texts are shortened and secrets masked on the way out, and the answer says so.",
    "003-send-required": "A `label`, or the id of an agent, may stand in place of `sessionKey`.",
    "003-reply-back-alternates": "Operators, scheduled jobs, hooks and ended sub-agents ask but are never stepped.",
    "003-send-announce-posted": "A control token among other words is not posted, and the exchange says so.",
    "004-send-announce-selected": "Nothing selects a channel: as in the others, it is the target's.",
    "003-spawn-no-nesting": "So by default; `maxSpawnDepth` can raise it.",
    "003-spawn-allow-any": "Any agent that is configured: an agent that does not exist cannot be spawned.",
    "003-spawn-thread": "Where the channel has no threads, or there is none yet, it is refused instead of ignored.",
    "003-spawn-attachments-place": "Under `.antiphon/attachments/<uuid>/`.",
    "004-announce-labels": "With `session.announce.locale` `pt`; English otherwise.",
    "003-visibility-tree": "With everything spawned below those, of any agent.",
    "003-sandbox-spawned": "Itself, too. Outside a sandbox the older documents set no limit; ours is `tree`.",
}
"""Where we do otherwise, and why."""

BEYOND_THE_SEEDS: dict[str, str] = {
    "K5": "The documents give forms of keys, not what keeps two apart.",
    "L5": "None says that a list was scoped; who reads it must know.",
    "H3": "None bounds or masks a history; prompts have an end, and secrets leak.",
    "H4": "None says how to read on beyond the limit, except over HTTP.",
    "H6": "None tells what people are shown from what is on record.",
    "S7": "None speaks of oneself, of cycles or of chains without end.",
    "S9": "None speaks of repeating a send.",
    "P5": "They post to the requester's chat only; the requester's model must know, too.",
    "A2": "Tools that users of such systems are used to.",
    "V3": "None says that list and read decide alike.",
}
"""Contract lines about keys, tools, visibility and policy that no sentence names, and what they add."""
