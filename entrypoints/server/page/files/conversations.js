// Conversations, kept in this browser and nowhere else. Each has a place of its own in localStorage; where that is
// full, log-probabilities go first, then the conversations that were not touched for longest.

import { changed, recall, remember, state, update } from "./store.js";

export const MOST = 100;
export const MOST_FILE_BYTES = 50_000_000;
export const MOST_CHARS = 4_000_000; // browsers give five million
const MOST_MESSAGES = 2_000;
const PREFIX = "pageloom.conversation.";

export const DEFAULTS = {
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  max_tokens: "",
  seed: "",
  stop: "",
  thinking: "",
  thinking_token_budget: "",
  logprobs: "",
  tools: "",
  schema: "",
  strict: true,
};

const id = () => crypto.getRandomValues(new Uint32Array(3)).reduce((text, part) => text + part.toString(36), "");

/** One without messages is there once at most. */
export function create() {
  const empty = state.conversations.find((conversation) => conversation.messages.length === 0);
  if (empty) return open(empty);
  const settings = state.current ? { ...state.current.settings } : { ...DEFAULTS };
  const conversation = { id: id(), title: "", updated: Date.now(), messages: [], settings };
  state.conversations.unshift(conversation);
  return open(conversation);
}

export function open(conversation) {
  remember("current", conversation.id);
  update({ current: conversation, drawer: null });
  return conversation;
}

export function rename(conversation, title) {
  conversation.title = title.trim().slice(0, 200);
  save(conversation);
}

export function remove(conversation) {
  remember(`conversation.${conversation.id}`, null);
  state.conversations = state.conversations.filter((other) => other !== conversation);
  if (state.current === conversation) state.current = state.conversations[0] ?? create();
  changed();
}

export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  return conversation.title || first?.content.split("\n")[0].slice(0, 80) || "New conversation";
}

/** To be called when something is complete, not with each token. One that is empty, or was deleted, is not kept. */
export function save(conversation) {
  if (!state.conversations.includes(conversation)) return;
  conversation.updated = Date.now();
  state.conversations.sort((a, b) => b.updated - a.updated);
  for (const old of state.conversations.slice(MOST)) remove(old);
  if (conversation.messages.length) {
    remember("current", conversation.id);
    makeRoom(conversation);
  }
  changed();
}

/** False: it does not fit. Throws where there is no storage. */
function write(conversation) {
  const text = JSON.stringify(conversation);
  const others = Object.keys(localStorage).filter((name) => name !== PREFIX + conversation.id);
  const used = others.reduce((sum, name) => sum + localStorage.getItem(name).length, 0);
  return used + text.length <= MOST_CHARS && remember(`conversation.${conversation.id}`, text);
}

function makeRoom(conversation) {
  const oldestFirst = () => [...state.conversations].reverse();
  try {
    if (write(conversation)) return;
    const bare = JSON.stringify(conversation, (name, value) => (name === "tokens" ? null : value));
    if (bare.length > MOST_CHARS) throw new Error("one is too long");
    for (const old of oldestFirst()) {
      if (!old.messages.some((message) => message.tokens)) continue;
      for (const message of old.messages) message.tokens = null;
      if (old !== conversation) remember(`conversation.${old.id}`, JSON.stringify(old));
      if (write(conversation)) return;
    }
    for (const old of oldestFirst()) {
      if (old === conversation) continue;
      remove(old);
      if (write(conversation)) return;
    }
  } catch (error) {
    console.warn("conversations are not kept:", error.message);
  }
}

export function load() {
  const found = [];
  try {
    for (const name of Object.keys(localStorage).filter((name) => name.startsWith(PREFIX))) {
      try {
        found.push(asConversation(JSON.parse(localStorage.getItem(name))));
      } catch {
        localStorage.removeItem(name);
      }
    }
  } catch {
    // no storage: nothing was kept
  }
  found.sort((a, b) => b.updated - a.updated);
  state.conversations = found;
  const last = recall("current");
  state.current = found.find((conversation) => conversation.id === last) ?? found[0] ?? null;
  if (state.current === null) create();
}

/** What was written elsewhere, in our own shape. Throws what is wrong with it. */
export function asConversation(value) {
  const text = (given, most = 1_000_000) => (typeof given === "string" ? given.slice(0, most) : "");
  if (typeof value !== "object" || value === null || !Array.isArray(value.messages)) {
    throw new Error("a conversation is an object with a list of messages");
  }
  const messages = value.messages.slice(0, MOST_MESSAGES).map((given, at) => {
    if (!["user", "assistant", "tool"].includes(given?.role)) throw new Error(`message ${at}: what role is that?`);
    const message = { role: given.role, content: text(given.content) };
    if (given.role === "tool")
      Object.assign(message, { tool_call_id: text(given.tool_call_id, 200), name: text(given.name, 200) });
    if (given.role !== "assistant") return message;
    const calls = Array.isArray(given.tool_calls) ? given.tool_calls.slice(0, 100) : [];
    message.reasoning = text(given.reasoning);
    message.tool_calls = calls.map((call) => ({
      id: text(call?.id, 200),
      name: text(call?.name ?? call?.function?.name, 200),
      arguments: text(call?.arguments ?? call?.function?.arguments),
    }));
    message.tokens =
      given.tokens?.length && Array.isArray(given.tokens) && given.tokens.every(isToken) ? given.tokens : null;
    message.stats = given.stats && typeof given.stats === "object" ? numbers(given.stats) : null;
    message.error = text(given.error, 2_000) || null;
    message.schema_error = text(given.schema_error, 2_000) || null;
    return message;
  });
  const settings = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) {
    if (typeof value.settings?.[name] === typeof DEFAULTS[name]) settings[name] = value.settings[name];
  }
  const updated = Number.isFinite(value.updated) ? Math.min(value.updated, Date.now()) : Date.now();
  return { id: text(value.id, 60) || id(), title: text(value.title, 200), updated, messages, settings };
}

const isToken = (token) =>
  Array.isArray(token) &&
  typeof token[0] === "string" &&
  typeof token[1] === "number" &&
  Array.isArray(token[2]) &&
  token[2].every((other) => Array.isArray(other) && typeof other[0] === "string" && typeof other[1] === "number");

const numbers = (stats) =>
  Object.fromEntries(
    Object.entries(stats).filter(([name, value]) =>
      name === "finish" ? typeof value === "string" : Number.isFinite(value),
    ),
  );

export function exportAll() {
  const text = JSON.stringify({ pageloom: 1, conversations: state.conversations.filter((c) => c.messages.length) });
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = Object.assign(document.createElement("a"), { href: address, download: "pageloom-conversations.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Conversations of a file, beside those that are there: the latest for which there is room. How many, and how many are
 * left out. Throws what is wrong with it. */
export function importText(text) {
  const given = JSON.parse(text);
  const list = [given?.conversations ?? given].flat();
  const found = list.map((value) => ({ ...asConversation(value), id: id() })).filter((one) => one.messages.length);
  if (found.length === 0) throw new Error("there is no conversation in it");
  found.sort((a, b) => b.updated - a.updated);
  const own = state.conversations.filter((conversation) => conversation.messages.length);
  const imported = [];
  for (const conversation of found) {
    if (own.length + imported.length >= MOST) break;
    if (write(conversation)) imported.push(conversation);
  }
  if (imported.length) {
    state.conversations = [...own, ...imported].sort((a, b) => b.updated - a.updated);
    open(imported[0]);
  }
  return { imported: imported.length, left: found.length - imported.length };
}
