// Panels of the board: where KV blocks are, where a step's time goes, what drafts bring.

import { blocks, cellKinds, rate, ratio, stepParts } from "./figures.js";
import { html, percent, short } from "./ui.js";

const CELLS = 360;
const KINDS = [
  ["pinned", "pinned"],
  ["used", "in use"],
  ["cached", "cached"],
  ["free", "free"],
];

/** In proportions: which block holds what is known to the core alone. */
export function Blocks({ look, before }) {
  const counts = blocks(look);
  const { stats } = look;
  const cells = Math.min(CELLS, counts.all);
  const each = counts.all / cells;
  const moved = (name) => rate(before, look, (at) => at.stats[name]);
  return html`<section class="panel blocks" aria-label="KV blocks">
    <h2>
      KV blocks
      <span class="hint">${each > 1 ? `a cell is ${short(each)} blocks` : `${short(counts.all)} blocks`}</span>
    </h2>
    <div class="cells" role="img" aria-label=${KINDS.map(([kind, name]) => `${counts[kind]} ${name}`).join(", ")}>
      ${cellKinds(counts, cells).map((kind) => html`<i class=${kind}></i>`)}
    </div>
    <ul class="keys-row">
      ${KINDS.map(([kind, name]) => html`<li><i class=${kind}></i>${name} <b>${short(counts[kind])}</b></li>`)}
    </ul>
    ${
      stats.host_blocks_total > 0
        ? html`<${Meter}
              label="Host memory: held by swapped sequences"
              value=${stats.host_blocks_used}
              most=${stats.host_blocks_total}
            />
            <${Meter}
              label="Host memory: found by prefix"
              value=${stats.host_blocks_cached}
              most=${stats.host_blocks_total}
              kind="cached"
            />
            <p class="hint">
              ${short(moved("blocks_swapped_out"))} blocks/s out, ${short(moved("blocks_swapped_in"))} in, over the last
              minute
            </p>`
        : html`<p class="hint">No host tier (--swap-space).</p>`
    }
    <${Meter}
      label="Prefix tokens found, of those looked up"
      value=${stats.prefix_hit_tokens}
      most=${stats.prefix_query_tokens}
      kind="cached"
    />
  </section>`;
}

function Meter({ label, value, most, kind = "" }) {
  const share = ratio(value, most) ?? 0;
  return html`<div class="meter">
    <div><span>${label}</span><b>${short(value)} of ${short(most)}</b></div>
    <div class="track"><i class=${kind} style=${{ width: `${100 * share}%` }}></i></div>
  </div>`;
}

const STEP = ["inputs", "attention plan", "model", "logits", "sampling", "results"];
const CORE = ["plan", "submit", "collect", "complete", "publish", "wait"];
const MEANING = {
  inputs: "differences to the tables, and the batch",
  "attention plan": "what all layers' attention shares",
  model: "all layers",
  results: "what was sampled, as host data",
  collect: "takes a step's result; on a CPU it computes the step",
  wait: "for a step that the device computes",
  publish: "tells the front end",
};

const START = { stats: { steps: 0, step_parts_s: {}, core_parts_s: {} } };

/** Of steps in the last ten seconds; where nothing ran, of all since the start. */
export function Parts({ before: recent, after }) {
  const lately = after.stats.steps > recent.stats.steps;
  const before = lately ? recent : START;
  const runner = stepParts(before, after, "step_parts_s", STEP);
  const title = after.engine.device === "cpu" ? "a step, by what it computes" : "a step, as its host launches it";
  const core = stepParts(before, after, "core_parts_s", CORE);
  const steps = rate(recent, after, (look) => look.stats.steps);
  return html`<section class="panel parts" aria-label="Step time by part">
    <h2>
      Step time
      <span class="hint">${lately ? `${short(steps)} steps/s, mean of the last seconds` : "mean since the start"}</span>
    </h2>
    ${runner.length > 0 && html`<${Stack} title=${title} parts=${runner} />`}
    ${core.length > 0 && html`<${Stack} title="the core's thread, for each step" parts=${core} />`}
    ${runner.length + core.length === 0 && html`<p class="hint">No step yet.</p>`}
  </section>`;
}

function Stack({ title, parts }) {
  const all = parts.reduce((sum, { ms }) => sum + ms, 0);
  const colours = new Map([...STEP, ...CORE].map((part, i) => [part, `part-${i % 6}`]));
  return html`<div class="stack">
    <div class="stack-head"><span>${title}</span><b>${all.toFixed(all < 10 ? 2 : 1)} ms</b></div>
    <div class="stack-bar" aria-hidden="true">
      ${parts.map(({ part, ms }) => html`<i class=${colours.get(part)} style=${{ flexGrow: ms }} title=${part}></i>`)}
    </div>
    <table>
      <caption class="hidden">
        ${title}
      </caption>
      ${parts.map(
        ({ part, ms }) =>
          html`<tr title=${MEANING[part]}>
            <th scope="row"><i class=${colours.get(part)}></i>${part}</th>
            <td>${ms < 0.0995 ? `${(1000 * ms).toFixed(0)} µs` : `${ms.toFixed(2)} ms`}</td>
            <td>${percent(ms / all)}</td>
          </tr>`,
      )}
    </table>
  </div>`;
}

export function Speculation({ before, after, method }) {
  const { stats } = after;
  const grown = (name) => stats[name] - before.stats[name];
  const lately = grown("drafted_tokens") > 0;
  const [drafts, drafted, accepted] = ["drafts", "drafted_tokens", "accepted_tokens"].map((n) =>
    lately ? grown(n) : stats[n],
  );
  const most = Math.max(1, ...stats.accepted_at);
  return html`<section class="panel speculation" aria-label="Speculation">
    <h2>Speculation <span class="hint">${method ?? "from grammars only"}</span></h2>
    ${
      stats.drafts === 0
        ? html`<p class="hint">No draft was computed yet.</p>`
        : html`<dl class="figures">
              <div>
                <dt>right, of drafts</dt>
                <dd>${percent(ratio(accepted, drafted))}</dd>
              </div>
              <div>
                <dt>tokens a step</dt>
                <dd>${drafts ? (1 + accepted / drafts).toFixed(2) : "–"}</dd>
              </div>
              <div>
                <dt>drafted</dt>
                <dd>${short(stats.drafted_tokens)}</dd>
              </div>
            </dl>
            <p class="hint">${lately ? "Last minute." : "Since the start."} Right by position, since the start:</p>
            <div class="positions" role="img" aria-label=${`Right drafts by position: ${stats.accepted_at.join(", ")}`}>
              ${stats.accepted_at.map(
                (right, i) =>
                  html`<div title=${`${i + 1}: ${right}`}>
                    <i style=${{ height: `${(100 * right) / most}%` }}></i><span>${i + 1}</span>
                  </div>`,
              )}
            </div>`
    }
  </section>`;
}
