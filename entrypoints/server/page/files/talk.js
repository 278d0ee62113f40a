// A conversation goes on: what is asked, what comes, and what is kept of it.

import { ApiError, chat } from "./api.js";
import { save } from "./conversations.js";
import { changed, state, update } from "./store.js";

const running = new Map(); // conversation id → AbortController

export const isRunning = (conversation) => running.has(conversation.id);

export function stop(conversation) {
  running.get(conversation.id)?.abort();
}

export function say(conversation, text) {
  conversation.messages.push({ role: "user", content: text });
  return answer(conversation);
}

/** Another answer in the place of message `at` and all that follows. */
export function regenerate(conversation, at) {
  conversation.messages.length = at;
  return answer(conversation);
}

/** What the user said at `at` is said otherwise; what followed is gone. */
export function edit(conversation, at, text) {
  conversation.messages.length = at;
  return say(conversation, text);
}

/** The results of the last message's calls, in their order. */
export function giveResults(conversation, results) {
  const { tool_calls: calls } = conversation.messages.at(-1);
  for (const [index, call] of calls.entries()) {
    conversation.messages.push({ role: "tool", tool_call_id: call.id, name: call.name, content: results[index] });
  }
  return answer(conversation);
}

async function answer(conversation) {
  const controller = new AbortController();
  const message = {
    role: "assistant",
    content: "",
    reasoning: "",
    tool_calls: [],
    tokens: null,
    stats: null,
    error: null,
  };
  let began = null;
  let first = null;
  let usage = null;
  let finish = null;
  let told = false;
  running.set(conversation.id, controller);
  try {
    const body = bodyOf(conversation); // before the new message is there
    conversation.messages.push(message);
    update({ said: "Waiting for an answer." });
    const take = collector(message);
    began = performance.now();
    for await (const chunk of chat(body, controller.signal)) {
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (choice === undefined) continue;
      if (take(choice) && first === null) first = performance.now();
      finish = choice.finish_reason ?? finish;
      message.schema_error = choice.schema_error ?? message.schema_error;
      changed();
    }
    told = true;
  } catch (error) {
    if (!conversation.messages.includes(message)) conversation.messages.push(message);
    if (error.name === "AbortError") finish = "stopped";
    else if (error instanceof ApiError)
      message.error = error.param ? `${error.message} (${error.param})` : error.message;
    else message.error = String(error.message ?? error);
  } finally {
    controller.abort(); // where what came could not be read, more may come
    running.delete(conversation.id);
    if (first !== null) message.stats = statsOf({ began, first, ended: performance.now(), usage, finish });
    save(conversation);
    update({ said: message.error ? `Error: ${message.error}` : told ? "The answer is complete." : "Stopped." });
  }
}

/** Puts what comes into the message; true where it was something of the answer. */
function collector(message) {
  const decoder = new TextDecoder(); // a character may be spread over tokens
  const calls = new Map(); // by their index: arguments come in parts, which say nothing else
  return ({ delta, logprobs }) => {
    const thought = delta.reasoning ?? delta.reasoning_content ?? "";
    message.reasoning += thought;
    message.content += delta.content ?? "";
    for (const { index, id, function: called, custom } of delta.tool_calls ?? []) {
      if (!calls.has(index)) {
        const call = { id: id ?? "", name: (called ?? custom)?.name ?? "", arguments: "" };
        calls.set(index, call);
        message.tool_calls.push(call);
      }
      calls.get(index).arguments += called?.arguments ?? custom?.input ?? "";
    }
    for (const { token, bytes, logprob, top_logprobs: others } of logprobs?.content ?? []) {
      const text = bytes ? decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
      (message.tokens ??= []).push([text, round(logprob), others.map((other) => [other.token, round(other.logprob)])]);
    }
    return Boolean(thought || delta.content || delta.tool_calls?.length);
  };
}

const round = (logprob) => Math.round(logprob * 1e4) / 1e4;

function statsOf({ began, first, ended, usage, finish }) {
  const tokens = usage?.completion_tokens ?? null;
  const rate = tokens > 1 && ended > first ? (1000 * (tokens - 1)) / (ended - first) : null;
  const stats = {
    finish,
    first_s: (first - began) / 1000,
    tokens,
    rate,
    prompt: usage?.prompt_tokens,
    cached: usage?.prompt_tokens_details?.cached_tokens,
    accepted: usage?.completion_tokens_details?.accepted_prediction_tokens,
    thought: usage?.completion_tokens_details?.reasoning_tokens,
  };
  return Object.fromEntries(Object.entries(stats).filter(([, value]) => value !== null && value !== undefined));
}

/** What the settings make of a conversation. Throws where one of them cannot be read. */
export function bodyOf(conversation) {
  const { settings } = conversation;
  const body = {
    model: state.model ?? undefined,
    messages: [
      ...(settings.system.trim() ? [{ role: "system", content: settings.system }] : []),
      ...conversation.messages.filter(isSent).map(asSent),
    ],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "thinking_token_budget"]) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  const stops = settings.stop.split("\n").filter((line) => line !== "");
  if (stops.length) body.stop = stops;
  if (settings.thinking) body.enable_thinking = settings.thinking === "on";
  if (settings.logprobs !== "") Object.assign(body, { logprobs: true, top_logprobs: Number(settings.logprobs) });
  const tools = toolsOf(settings.tools);
  if (tools.length) body.tools = tools;
  const schema = parsed(settings.schema, "schema");
  if (schema !== null) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: settings.strict } };
  }
  return body;
}

const isSent = (message) => message.role !== "assistant" || message.content || message.tool_calls.length;

function asSent(message) {
  if (message.role !== "assistant") return message;
  const sent = { role: "assistant", content: message.content };
  if (message.tool_calls.length) {
    if (message.reasoning) sent.reasoning = message.reasoning; // a model that calls goes on from what it thought
    sent.tool_calls = message.tool_calls.map(({ id, name, arguments: given }) => ({
      id,
      type: "function",
      function: { name, arguments: given },
    }));
  }
  return sent;
}

function parsed(text, what) {
  if (!text.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The ${what} is not JSON: ${error.message}`);
  }
}

/** A list of tools, each as OpenAI has it or as its function alone. */
export function toolsOf(text) {
  const given = parsed(text, "list of tools") ?? [];
  return (Array.isArray(given) ? given : [given]).map((tool) =>
    tool?.type ? tool : { type: "function", function: tool },
  );
}

/** What is wrong with a setting that is JSON; null: nothing. */
export function complaint(name, text) {
  try {
    if (name === "tools") toolsOf(text);
    else parsed(text, "schema");
    return null;
  } catch (error) {
    return error.message;
  }
}
