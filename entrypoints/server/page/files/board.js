// The board: what the server does now. It looks once a second, while somebody can see it.

import { get } from "./api.js";
import { Blocks, Parts, Speculation } from "./board_parts.js";
import { Chart } from "./charts.js";
import { HISTORY, ago, columns, isRestart, latency, rate, ratio } from "./figures.js";
import { state } from "./store.js";
import { Component, duration, html, percent, short } from "./ui.js";

const EVERY_MS = 1000;
const kept = []; // looks, also while the board is not shown

const stat = (name) => (look) => look.stats[name];
const speed = (name) => (before, look) => rate(before, look, stat(name));
const seconds = (value) => duration(value);
const count = (value) => short(value);

export class Board extends Component {
  state = { looks: kept, trouble: null };

  componentDidMount() {
    document.addEventListener("visibilitychange", this.next);
    this.next();
  }

  componentWillUnmount() {
    this.gone = true;
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.next);
  }

  next = async () => {
    clearTimeout(this.timer);
    if (this.gone || document.hidden || this.looking) return;
    this.looking = true;
    try {
      const look = { ...(await get("v1/board")), time: Date.now() / 1000 };
      if (kept.length && isRestart(kept.at(-1), look)) kept.length = 0;
      kept.push(look);
      if (kept.length > HISTORY) kept.shift();
      look.each = latency(kept, "per_token_s");
      this.setState({ trouble: null });
    } catch (error) {
      this.setState({ trouble: error.message });
      if (error.status === 401) this.gone = true; // nobody has the key: asked again when the board is opened again
    } finally {
      this.looking = false;
    }
    this.timer = setTimeout(this.next, EVERY_MS);
  };

  render(_, { trouble }) {
    const last = kept.at(-1);
    return html`<main class="board" aria-label="Board">
      ${trouble && html`<div class="error" role="alert">${trouble}</div>`}
      ${last ? html`<${Figures} looks=${[...kept]} />` : !trouble && html`<p class="hint empty">Looking …</p>`}
    </main>`;
  }
}

function Figures({ looks }) {
  const last = looks.at(-1);
  const { stats, engine } = last;
  const lately = ago(looks, 5);
  const minute = ago(looks, 60);
  const first = latency(looks, "first_token_s");
  const { each } = last;
  const grown = (name, since = minute) => stats[name] - since.stats[name];
  const hits = ratio(grown("prefix_hit_tokens"), grown("prefix_query_tokens"));
  const ever = ratio(stats.prefix_hit_tokens, stats.prefix_query_tokens);
  return html`
    <${About} engine=${engine} stats=${stats} />
    <section class="tiles" aria-label="Figures">
      <${Tile}
        label="Generated"
        value=${short(rate(lately, last, stat("generated_tokens")))}
        unit="tok/s"
        note=${`${short(stats.generated_tokens)} in all`}
        kind="c1"
      />
      <${Tile}
        label="Prompts"
        value=${short(rate(lately, last, stat("prompt_tokens")))}
        unit="tok/s"
        note=${`${short(stats.prompt_tokens)} in all`}
        kind="c2"
      />
      <${Tile}
        label="Running"
        value=${short(stats.running)}
        unit=${`of ${short(engine.max_num_seqs)}`}
        note=${`${short(Object.values(last.ended).reduce((sum, each) => sum + each, 0))} ended`}
      />
      <${Tile}
        label="Queue"
        value=${short(stats.waiting)}
        unit="waiting"
        note=${`${short(stats.preemptions)} preempted`}
        kind=${stats.waiting ? "warn" : ""}
      />
      <${Tile}
        label="First token, TTFT"
        value=${duration(first.p50)}
        unit=${first.count ? "p50" : ""}
        note=${tail(first)}
      />
      <${Tile} label="Per token, TPOT" value=${duration(each.p50)} unit=${each.count ? "p50" : ""} note=${tail(each)} />
      <${Tile}
        label="Prefix hits"
        value=${percent(hits ?? ever)}
        note=${hits === null ? "all time" : `${percent(ever)} all time`}
      />
      <${Tile}
        label="KV cache"
        value=${percent(ratio(stats.kv_blocks_used, stats.kv_blocks_total) ?? 0)}
        unit="held"
        note=${`${short(stats.kv_blocks_used)} of ${short(engine.num_blocks)} blocks`}
      />
    </section>
    <section class="charts" aria-label="Last five minutes">
      <${Chart}
        theme=${state.theme}
        height=${150}
        least=${10}
        label="Tokens/s"
        data=${columns(looks, [speed("generated_tokens"), speed("prompt_tokens")])}
        series=${[
          ["generated", "c1", count],
          ["prompts", "c2", count],
        ]}
      />
      <${Chart}
        theme=${state.theme}
        height=${150}
        least=${4}
        label="Sequences"
        data=${columns(looks, [(_, look) => look.stats.running, (_, look) => look.stats.waiting])}
        series=${[
          ["running", "c1", count],
          ["waiting", "c3", count],
        ]}
      />
      <${Chart}
        theme=${state.theme}
        height=${150}
        least=${0.004}
        label="Time"
        data=${latencies(looks)}
        series=${[
          ["per token", "c1", seconds],
          ["step", "c4", seconds],
        ]}
      />
      <${Chart}
        theme=${state.theme}
        height=${150}
        least=${40}
        label="KV blocks"
        data=${columns(looks, [(_, look) => look.stats.kv_blocks_used, (_, look) => look.stats.kv_blocks_cached])}
        series=${[
          ["held", "c1", count],
          ["cached", "c2", count],
        ]}
      />
    </section>
    <section class="panels">
      <${Blocks} look=${last} before=${minute} />
      <${Parts} before=${ago(looks, 10)} after=${last} />
      <${Speculation} before=${minute} after=${last} method=${engine.speculation} />
    </section>
  `;
}

const tail = ({ p95, count: requests, lately }) =>
  requests === 0 ? "no request yet" : `p95 ${duration(p95)}, ${lately ? "1 min" : "all time"}`;

/** The median time per token of each look's last minute, and the mean time of the steps since the look before. */
function latencies(looks) {
  return columns(looks, [(_, { each }) => (each.lately ? each.p50 : null), busyPerStep]);
}

function busyPerStep(before, look) {
  const busy = (at) =>
    Object.entries(at.stats.core_parts_s).reduce((sum, [part, s]) => sum + (part === "idle" ? 0 : s), 0);
  const steps = look.stats.steps - before.stats.steps;
  return steps > 0 ? (busy(look) - busy(before)) / steps : null;
}

function Tile({ label, value, unit = "", note, kind = "" }) {
  return html`<div class=${`tile ${kind}`}>
    <div class="tile-label">${label}</div>
    <div class="tile-value">${value}<span>${unit}</span></div>
    <div class="tile-note">${note}</div>
  </div>`;
}

function About({ engine, stats }) {
  const facts = [
    ["model", engine.model],
    ["device", `${engine.device}, ${engine.dtype}${engine.quantization ? `, ${engine.quantization}` : ""}`],
    ["attention", engine.attention_backend],
    ["KV cache", `${engine.kv_cache_dtype}, blocks of ${engine.block_size}`],
    ["context", short(engine.max_model_len)],
    ["step", `≤ ${short(engine.max_num_seqs)} sequences, ${short(engine.max_num_batched_tokens)} tokens`],
    ["version", engine.version],
  ];
  const told = stats.compiling
    ? "compiling: steps are eager meanwhile"
    : stats.compile_failed
      ? "did not compile: steps are eager"
      : null;
  return html`<dl class="about">
    ${facts.map(
      ([name, value]) =>
        html`<div>
          <dt>${name}</dt>
          <dd>${value}</dd>
        </div>`,
    )}
    ${told && html`<div class="badge">${told}</div>`}
  </dl>`;
}
