// An answer's tokens, each on the colour of its probability; the alternatives of the one that is pointed at.

import { Component, html, percent } from "./ui.js";

const LEVELS = [0.9, 0.7, 0.5, 0.3, 0.15, 0.05];

/** 0 (likely) to 6 (a surprise). */
export function level(logprob) {
  const probability = Math.exp(logprob);
  const found = LEVELS.findIndex((least) => probability >= least);
  return found < 0 ? LEVELS.length : found;
}

const visible = (text) => (text === "" ? "·" : text.replaceAll("\n", "⏎\n"));

export class Tokens extends Component {
  state = { at: null };

  point = (event) => {
    const token = event.target.closest("[data-at]");
    if (token) this.setState({ at: Number(token.dataset.at) });
  };

  keys = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const last = this.props.tokens.length - 1;
    this.setState(({ at }) => ({ at: Math.max(0, Math.min(last, (at ?? -step) + step)) }));
  };

  render({ tokens }, { at }) {
    const mean = tokens.reduce((sum, [, logprob]) => sum + logprob, 0) / tokens.length;
    return html`<div class="tokens">
      <div
        class="token-text"
        tabindex="0"
        role="group"
        aria-label="Tokens by probability: arrow keys go from one to the next"
        onMouseOver=${this.point}
        onClick=${this.point}
        onKeyDown=${this.keys}
      >
        ${tokens.map(
          ([text, logprob], index) =>
            html`<span data-at=${index} class=${`level-${level(logprob)}${index === at ? " here" : ""}`}
              >${visible(text)}</span
            >`,
        )}
      </div>
      <div class="token-about" aria-live="polite" style=${{ minHeight: `${36 + 27 * tokens[0][2].length}px` }}>
        ${at === null
          ? html`<${Legend} mean=${mean} count=${tokens.length} />`
          : html`<${Alternatives} token=${tokens[at]} />`}
      </div>
    </div>`;
  }
}

function Legend({ mean, count }) {
  return html`<div class="legend-line">
    <span>likely</span>${[...LEVELS, 0].map((_, index) => html`<i class=${`level-${index}`}></i>`)}<span>unlikely</span>
    <span class="hint">${count} tokens, perplexity ${Math.exp(-mean).toFixed(2)}</span>
  </div>`;
}

function Alternatives({ token: [text, logprob, others] }) {
  const rows = others.some(([other, at]) => other === text && at === logprob) ? others : [...others, [text, logprob]];
  return html`<table class="alternatives">
    <caption class="hidden">
      Alternatives
    </caption>
    ${rows.map(
      ([other, at]) =>
        html`<tr class=${other === text && at === logprob ? "chosen" : null}>
          <td><code>${JSON.stringify(other).slice(1, -1)}</code></td>
          <td class="share"><i style=${{ width: `${Math.max(1, 100 * Math.exp(at))}%` }}></i></td>
          <td class="number">${percent(Math.exp(at))}</td>
          <td class="number">${at.toFixed(3)}</td>
        </tr>`,
    )}
  </table>`;
}
