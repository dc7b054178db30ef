"""What Antiphon promises, as data: every contract line, guarantee and sentence has an id, a source and a part.

A test names what it proves with `@pytest.mark.requirement("K1", …)`; `test_requirements.py` fails on a promise of
a delivered part that no test names, and on a name that is not here. Parts that are not delivered yet are listed,
but not checked. Of the sentences in `seeds.py`, which the contract's lines cover, a test names those that are
`EXPLICIT`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from seeds import SEEDS, Sentence

Part = Literal["core", "gateway", "tools", "channels", "later"]
"""In the order in which they are delivered; `later` is not planned yet."""
DELIVERED: frozenset[Part] = frozenset({"core", "gateway", "tools"})


class Requirement(NamedTuple):
    text: str
    source: str
    part: Part


CONTRACT: dict[str, tuple[Part, str]] = {
    "K1": ("core", "Stored keys have one canonical form per kind of session."),
    "K2": ("core", "`main` and `current` are the caller's own; short and full spellings are both accepted."),
    "K3": (
        "core",
        "`global` and `unknown` are never listed nor accepted; with global scope all transports use `main`.",
    ),
    "K4": ("core", "Older spellings are accepted and normalised."),
    "K5": ("core", "parse(format(k)) == k and format is injective, for any id a channel can produce."),
    "K6": (
        "core",
        "Kind and channel follow from key and record; messages over the gateway belong to webchat.",
    ),
    "K7": ("core", "Direct chats are scoped by session.dmScope, with identity links."),
    "L1": (
        "core",
        "sessions_list filters: kinds, limit, activeMinutes, agentId, label, search, spawnedBy, archived.",
    ),
    "L2": ("core", "Newest first by updatedAt, then key; pages by cursor."),
    "L3": (
        "core",
        "A list row has exactly the agreed names, absent when unknown; its model is one that spawn takes.",
    ),
    "L4": ("core", "transcriptPath names a JSONL file that exists; without a file it is left out."),
    "L5": (
        "tools",
        "A scoped list says so, counts what it hides and names the settings that would show more.",
    ),
    "H1": ("core", "History by key or session id, limited, with cursors both ways."),
    "H2": ("core", "History is raw transcript entries, oldest first; tool results only when asked for."),
    "H3": ("tools", "History is bounded and masked on the way out, and says what was cut."),
    "H4": ("core", "Following the cursors gives the transcript exactly, also while it grows."),
    "H5": (
        "tools",
        "Unknown and invisible sessions look alike; a refusal names the agent's reach and the setting that decides.",
    ),
    "H6": (
        "tools",
        "People see the conversation without control tokens, step prompts or blocked announces; raw history has all.",
    ),
    "S1": ("tools", "sessions_send: targets and parameters."),
    "S2": (
        "tools",
        "sessions_send: results that separate delivery from reply; the model reads exactly that JSON.",
    ),
    "S3": ("tools", "The sent message is byte-equal, with provenance, and framed as data."),
    "S4": ("core", "A wait is on the server and on durable state: it can be dropped and repeated."),
    "S5": ("tools", "Reply-back turns alternate and are bounded."),
    "S6": (
        "tools",
        "The announce step: silent for a skip token alone, else posted with tokens cut out and addresses masked.",
    ),
    "S7": ("tools", "Self-sends, wait cycles and endless chains are refused."),
    "S8": ("core", "A send that the policy denies says: send blocked by session policy."),
    "S9": ("core", "The same idempotency key is one message."),
    "P1": ("tools", "sessions_spawn: parameters."),
    "P2": ("tools", "Spawning is durable when accepted, and refused before anything exists."),
    "P3": ("tools", "The child's key and tools."),
    "P4": ("tools", "Completion is announced as Status, Result, Notes and stats."),
    "P5": ("tools", "The result reaches the requester's transcript and wakes it."),
    "P6": ("tools", "runTimeoutSeconds holds across restarts."),
    "P7": ("tools", "Auto-archive and cleanup."),
    "P8": ("tools", "The sandbox guard."),
    "P9": ("tools", "Attachments with receipts."),
    "P10": ("channels", "Thread-bound children."),
    "A1": ("tools", "agents_list is what sessions_spawn would accept."),
    "A2": ("tools", "Companion tools."),
    "V1": ("core", "Visibility self, tree, agent, all; cross-agent needs all and agentToAgent."),
    "V2": (
        "core",
        "A sandboxed session is clamped to its tree; sessionToolsVisibility all lifts that and stands for all.",
    ),
    "V3": ("core", "One authorize() on canonical keys; listed if and only if readable."),
    "D1": ("core", "Send policy: override, deny, allow, default, in that order."),
    "D2": (
        "core",
        "The owner's standalone /send works on every transport and is answered in one line; anyone else's is ignored.",
    ),
    "D3": ("tools", "The outbox applies the policy to everything outbound; inbound is always recorded."),
    "T1": (
        "tools",
        "Agents have tools for files and the web, bounded, which accept the argument names of other programs.",
    ),
    "T2": (
        "tools",
        "Profiles and lists select tools by agent, provider, sandbox and sub-agent; they fail closed and name the key.",
    ),
    "T3": (
        "tools",
        "An agent has a workspace, whose files are in its prompt; a child has its own, with its attachments.",
    ),
    "T4": (
        "tools",
        "File tools stay inside the workspace and change only versions that the session has read.",
    ),
    "T5": (
        "tools",
        "A command survives the gateway: its true result is adopted, or the model reads that it was interrupted.",
    ),
    "T6": (
        "tools",
        "Commands run in the sandbox unless the operator chose this machine, with an explicit policy and a made"
        " environment.",
    ),
    "T7": (
        "tools",
        "A call that needs approval waits durably for a person with the scope, expires as denied, and runs once.",
    ),
    "W1": ("gateway", "The WebSocket protocol."),
    "W2": ("gateway", "Its methods."),
    "W3": ("gateway", "Its events, numbered per session."),
    "W4": ("gateway", "HTTP history and SSE."),
    "W5": (
        "gateway",
        "HTTP tools (200 for every answer of a tool, refusals too), OpenAI-compatible API, hooks, health, metrics.",
    ),
    "W6": ("gateway", "Real clients work unchanged."),
    "W7": ("gateway", "Loopback, tokens, Origin, scopes."),
    "W8": (
        "core",
        "A turn that was stopped or failed stays one in the prompt, apart from the next question.",
    ),
    "W9": ("gateway", "Streaming costs what is said, and a change of a session its row once."),
    "M2": (
        "gateway",
        "MCP clients use the session tools and transcripts at /mcp and over stdio, in both generations, with the rights"
        " of a token, as an operator or as a named session; waits fit clients' patience.",
    ),
    "M3": (
        "tools",
        "An agent can be an ACP program: a process per session, in the sandbox when the session is, its conversation"
        " loaded after a restart, its text and calls in the transcript, its permission requests under the policy for"
        " commands; it can be spawned. During its turns it can use the session tools, with the rights of its session"
        " alone. `antiphon acp` makes any agent an ACP agent for an editor.",
    ),
    "T8": ("tools", "A typed Python function marked with antiphon.tool is a tool, loaded from tools.python."),
    "B1": (
        "tools",
        "A sandbox is configured by mode, scope, access, backend, binds and pruning; what cannot work is refused before"
        " a command needs it. Commands reach no network, or only the listed hosts through a proxy that checks their"
        " addresses.",
    ),
    "B2": (
        "tools",
        "A sandbox counts only if it was examined from inside; `sandbox: require` is refused without one. An agent that"
        " is a Python function is never sandboxed: such a configuration is a warning, and such a run is refused.",
    ),
    "B3": (
        "tools",
        "Nothing that a command tries leads out of its sandbox, and what it takes of the host is bounded; for bwrap of"
        " root and of a user, for Landlock, and for Docker where an engine can be started.",
    ),
    "M1": (
        "tools",
        "Tools of MCP servers over stdio and HTTP, with headers and OAuth, are offered as mcp__server__tool; a server"
        " that cannot be used hides only its own tools and is named.",
    ),
    "C": ("core", "Configuration: JSON5, errors that name the path, secrets by reference, a JSON Schema."),
    "R": ("core", "Commands: self-explaining, --json, one-sentence errors, documented exit codes."),
}

GUARANTEES: dict[str, tuple[Part, str]] = {
    "G1": ("core", "A run's end and what follows from it are one commit; it is never absent."),
    "G2": (
        "core",
        "Accepted means durable; after a crash each accepted run is resumed once or says it was not.",
    ),
    "G3": (
        "tools",
        "A logical message is sent once although it is retried; a doubtful send is on record, not repeated.",
    ),
    "G4": ("tools", "Delivery, run and reply are separate: a timeout says that the message was delivered."),
    "G5": (
        "core",
        "A durable FIFO per session; the message in the transcript is byte-equal to what was sent.",
    ),
    "G6": (
        "tools",
        "A run's destination is fixed when it is admitted; only people's messages move a session's route.",
    ),
    "G7": (
        "tools",
        "The outbox keeps control tokens, frames and the addresses in session keys out of chats.",
    ),
    "G8": (
        "later",
        "A group of children ends in one completion. Nothing groups spawns yet: each announces itself.",
    ),
    "G9": ("core", "Waking an idle session is prompt and cannot be lost."),
    "G10": (
        "core",
        "The outcome comes from runtime facts: no answer is never `ok`, and terminal is terminal.",
    ),
    "G11": (
        "tools",
        "Result is the child's last text verbatim up to a cap, and says when it is cut or a tool's.",
    ),
    "G12": ("core", "Waiting holds no slot; sessions never wait for each other."),
    "G13": ("core", "One writer per session, enforced by the database; reads neither fail nor delay it."),
    "G14": (
        "tools",
        "Every message between sessions has a chain and a hop; any ring stops at the limit, by name.",
    ),
    "G15": (
        "tools",
        "Reply-back and announce are chosen per call; self-sends are refused; turns are not user input.",
    ),
    "G16": ("core", "Cancel is hard, cascades, and leaves nothing running without a live lease."),
    "G17": ("core", "Deadlines are wall-clock, hold across restarts, and keep the partial text."),
    "G18": (
        "tools",
        "A completion whose requester is gone goes where its job says; outstanding children are waited for.",
    ),
    "G19": (
        "tools",
        "A completion goes to the immediate parent; further up only when that is deleted, and it says so.",
    ),
    "G20": ("core", "Provider failures are retried with bounded, jittered backoff."),
    "G21": ("core", "The store survives kills and full disks, refuses damage clearly, and retention runs."),
    "G22": ("core", "Lists cost the same however many sessions there are."),
    "G23": (
        "core",
        "History pages are bounded, stable and complete, and narrowed by role, tool, time and failure.",
    ),
    "G24": ("core", "Memory is flat; a run that kills its process is quarantined."),
    "G25": (
        "core",
        "A key's session id changes only by a reset that was asked for or configured, on record, and the old one"
        " stays readable.",
    ),
    "G26": ("core", "Any prefix of a transcript makes a valid provider request."),
    "G27": ("core", "Archiving hides and keeps; only idle sessions are touched."),
    "G28": ("core", "The usage ledger is append-only, adds up, outlives sessions; an unknown price is null."),
    "G29": ("core", "The model that was asked for is the one used, and the one that answered is reported."),
    "G30": ("core", "List, read, send and control are one decision with separate grants."),
    "G31": ("core", "Only configured and allowed agents can be spawned; `*` means every configured one."),
    "G32": ("core", "Keys do not collide, and errors about them say what would work."),
    "G33": ("tools", "The policy never stops what comes in."),
    "G34": ("core", "Shared direct chats are a visible choice."),
    "G35": (
        "tools",
        "Secrets are masked on the way out, never in what a model reads again; files are private.",
    ),
    "G36": (
        "tools",
        "Provenance is stored, shown as data in a frame content cannot close; commands need a human.",
    ),
    "G37": ("core", "No identity is global: two hundred interleaved sessions never see each other."),
    "G38": ("core", "A feed gives each entry once and in order, although events were dropped."),
    "G39": (
        "tools",
        "What a running child does can be seen, and it can report to its parent, at a bounded rate.",
    ),
    "G40": ("tools", "How loudly a child announces is chosen per spawn."),
    "G41": (
        "tools",
        "An approval is durable, bound to its call, answered once, and expires to deny.",
    ),
    "G42": (
        "channels",
        "Binding a thread is atomic with the spawn; without threads the error names what works.",
    ),
    "G43": ("tools", "Who said what to whom, with which outcome, is one log written with the effect."),
    "G44": ("tools", "Files between sessions are addressed by hash and have receipts."),
    "G45": ("core", "Schema migrations are transactional and tested from the schema before."),
}

SECURITY: dict[str, tuple[Part, str]] = {
    "SEC1": (
        "gateway",
        "A page of a foreign origin is refused, even with the token; no token in URLs or logs.",
    ),
    "SEC2": (
        "gateway",
        "A local connection is no credential, headers of proxies are ignored, one mode of auth.",
    ),
    "SEC3": ("gateway", "Scopes come from the server's record; asking for more never grants more."),
    "SEC4": (
        "gateway",
        "One authorization for every transport; a command in a text needs what its method needs.",
    ),
    "SEC5": ("tools", "Resolve, canonicalise, authorize; denied and missing look the same."),
    "SEC6": ("tools", "A child's permissions never exceed its parent's."),
    "SEC7": ("tools", "Attachments: hostile names, links and sizes."),
    "SEC8": ("channels", "No request of ours can be made to reach a private address."),
    "SEC9": (
        "gateway",
        "Wrong secrets are limited before anything else happens; compares take constant time.",
    ),
    "SEC10": ("tools", "Titles, labels and messages of others are data."),
    "SEC11": ("gateway", "Subscriptions pass the same authorization as reads."),
    "SEC12": ("tools", "What cannot ask a human fails closed."),
    "SEC13": (
        "tools",
        "Approvals cannot be bypassed through children; a grant belongs to the agent that was asked about.",
    ),
    "SEC14": ("gateway", "Sizes are limited on arrival, before anything is parsed."),
}

WORK: dict[str, tuple[Part, str]] = {
    "LOOP": (
        "tools",
        "With tools.loopDetection, a call that a run repeats without any change is told, then refused, then ends it.",
    ),
    "AT1": (
        "tools",
        "A started command has a result, is running, or is said to be interrupted; its text is what it printed.",
    ),
    "AT2": ("tools", "After a stop, a timeout or a deletion, no process of a command is left within 2 s."),
    "AT3": (
        "tools",
        "A wait for a command ends with it or at its deadline, whatever holds its output; its input is at its end.",
    ),
    "AT4": (
        "tools",
        "The end of a background command wakes its session exactly once; one that we ended wakes nothing.",
    ),
    "AT5": (
        "tools",
        "Output of any size is bounded, keeps its first and last lines, and the rest is a file that can be read.",
    ),
    "AT6": (
        "tools",
        "A sandbox that does not work at any moment runs nothing, and the refusal names the cure.",
    ),
    "AT7": (
        "tools",
        "A session is called sandboxed only where a look from inside has proved it, for every tool and runtime.",
    ),
    "AT8": ("tools", "The known causes of a sandbox that cannot start are told apart, each with its cure."),
    "AT9": (
        "tools",
        "What a command writes, the file tools read, and the reverse; what one is refused, so is the other.",
    ),
    "AT10": (
        "tools",
        "Directories of a container are used only after files in them have proven that they are the gateway's.",
    ),
    "AT12": (
        "tools",
        "No secret of the gateway's environment, configuration or arguments is found in a sandbox.",
    ),
    "AT11": ("tools", "However links are swapped, no byte outside the workspace is read or written."),
    "AT16": (
        "tools",
        "There are never more processes of MCP servers than servers and scopes, and none is left behind.",
    ),
    "AT17": (
        "tools",
        "The first call after a restart of an MCP server succeeds; a call that it may have received is never repeated.",
    ),
    "AT18": (
        "tools",
        "An MCP server that is down affects neither the others nor the start, and model and operator read why; a login"
        " survives restarts.",
    ),
    "AT19": (
        "tools",
        "The handshake of an ACP program is bounded, every turn ends with text or a named error, and no process is"
        " left.",
    ),
    "AT15": (
        "tools",
        "A write or an edit on a version that was not seen is refused; of two writers none is lost.",
    ),
    "AT13": (
        "tools",
        "An approval suspends the call: allowed, it runs once; denied or expired, it says so; restarts change nothing.",
    ),
    "AT14": (
        "tools",
        "No text of a model approves anything, and a grant covers one whole call.",
    ),
    "AT20": (
        "tools",
        "A tool that was killed at any moment has its effect at most once, and its result says so.",
    ),
}
"""What users of other agents suffer from when their agents work."""

CHANNELS: dict[str, tuple[Part, str]] = {
    "N1": (
        "tools",
        "Channels have the keys and defaults of the family; what has no effect is named with its reason.",
    ),
    "N3": (
        "tools",
        "Each accepted message of a person is one run, in order, exactly once; strangers get a pairing code at most.",
    ),
    "N4": (
        "tools",
        "A text for a service is sent in parts, each once, paced, in order; what is in doubt or too old is visible.",
    ),
    "N6": ("tools", "Commands come from one table, with owner rules, and only from a person's own message."),
    "N7": ("tools", "Whether a channel is connected, its last proof of life and what to do are shown."),
    "CH1": (
        "tools",
        "A message is taken once, whatever the service repeats; one that cannot be taken is given up visibly.",
    ),
    "CH3": ("tools", "A send whose outcome is unknown is not repeated, unless the service takes its key."),
    "CH4": ("tools", "What was certainly not sent is sent later; polling never holds up a message."),
    "CH5": ("tools", "A delivery expires, visibly, and is not sent afterwards."),
    "CH6": ("tools", "A failure never replaces an answer."),
    "CH7": ("tools", "Nothing is dropped at a start: what was written meanwhile is answered in order, once."),
    "CH8": ("tools", "Deliveries wait until their channel is ready, without losing an attempt."),
    "CH9": ("tools", "A channel without a recent proof of life is not called connected."),
    "CH10": ("tools", "Reconnects wait longer and longer, and no account affects another."),
    "CH11": ("tools", "One process at a time receives for an account; a foreign receiver is named."),
    "CH13": ("tools", "An answer goes to the chat that its message came from, and to no other."),
    "CH14": ("tools", "An answer stays in its thread; it never goes to the root instead."),
    "CH16": ("tools", "An id is the same in the service, in keys, in the store and in calls."),
    "CH17": ("tools", "One table decides who reaches an agent, and each decision has a reason."),
    "CH18": ("tools", "A pairing holds for one account and never in groups; it can be listed and revoked."),
    "CH19": ("tools", "A webhook without a secret does not exist, and a request without it has no effect."),
    "CH20": ("tools", "Bots and own messages are not answered."),
    "CH21": (
        "tools",
        "A text is split after rendering, each part valid alone, and refused markup is sent plain once.",
    ),
    "CH22": ("tools", "A text is taken whatever becomes of its files, and says what was left out."),
    "CH23": ("tools", "A wait that a service names is kept, per chat and account, also after a restart."),
    "CH24": (
        "tools",
        "Typing belongs to a run, ends with it, and is never shown to those who are not answered.",
    ),
}
"""What users of other agents suffer from in chats."""

REQUIREMENTS: dict[str, Requirement] = {
    **{name: Requirement(text, f"contract {name}", part) for name, (part, text) in CONTRACT.items()},
    **{name: Requirement(text, f"guarantee {name}", part) for name, (part, text) in GUARANTEES.items()},
    **{name: Requirement(text, f"security {name}", part) for name, (part, text) in SECURITY.items()},
    **{name: Requirement(text, f"agents at work {name}", part) for name, (part, text) in WORK.items()},
    **{name: Requirement(text, f"channels {name}", part) for name, (part, text) in CHANNELS.items()},
}


def _part(sentence: Sentence) -> Part:
    """Return the last part that covers the sentence; every sentence needs at least the tools."""
    parts: list[Part] = ["tools", *(REQUIREMENTS[line].part for line in sentence.contract)]
    return max(parts, key=get_args(Part).index)


SENTENCES: dict[str, Requirement] = {
    sentence.id: Requirement(sentence.text, sentence.source, _part(sentence)) for sentence in SEEDS
}
