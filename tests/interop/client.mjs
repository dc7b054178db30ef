// The published reference client, driven through one turn; what it saw goes to standard output as one JSON object.
//   node client.mjs <node_modules> <url> <session key>     (the token is in OPENCLAW_GATEWAY_TOKEN)
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, url, sessionKey] = process.argv.slice(2);
const published = createRequire(join(modules, "resolve-from-here.js"));
const load = (name) => import(pathToFileURL(published.resolve(name)).href);
const { GatewayClient } = await load("@openclaw/gateway-client");
const { PROTOCOL_VERSION } = await load("@openclaw/gateway-protocol/version");

const seen = { events: [], gaps: [], closes: [] };
const greeted = Promise.withResolvers();
const answered = Promise.withResolvers();
const client = new GatewayClient({
  url,
  token: process.env.OPENCLAW_GATEWAY_TOKEN,
  minProtocol: PROTOCOL_VERSION,
  maxProtocol: PROTOCOL_VERSION,
  scopes: ["operator.read", "operator.write"],
  onHelloOk: greeted.resolve,
  onConnectError: greeted.reject,
  onGap: (gap) => seen.gaps.push(gap),
  onClose: (code, reason) => seen.closes.push({ code, reason }),
  onEvent: (event) => {
    seen.events.push(event);
    if (event.event === "chat" && ["final", "error", "aborted"].includes(event.payload?.state)) answered.resolve();
  },
});
const late = setTimeout(() => {
  console.error(`No end of the turn was seen within 40 s: ${JSON.stringify(seen)}`);
  process.exit(1);
}, 40_000);

client.start();
seen.hello = await greeted.promise;
seen.health = await client.request("health", {});
await client.request("sessions.create", { key: sessionKey });
seen.subscribed = await client.request("sessions.messages.subscribe", { key: sessionKey });
const message = "slow 1 word by word";
seen.ack = await client.request("chat.send", { sessionKey, message, idempotencyKey: "client-1" });
await answered.promise;
seen.sessions = await client.request("sessions.list", { limit: 20 });
seen.unsubscribed = await client.request("sessions.messages.unsubscribe", { key: sessionKey });
seen.refused = await client.request("sessions.list", { limit: 0 }).catch((error) => String(error.message));
clearTimeout(late);
seen.closesBeforeStop = seen.closes.length;
client.stop();
console.log(JSON.stringify(seen));
