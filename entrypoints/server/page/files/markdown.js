// Markdown as elements. marked splits the text; what it finds becomes elements one by one, never HTML: what a model
// writes as HTML is shown as it is written, images are links that somebody must follow, and links lead to the web or
// to mail only.

import { lex } from "./lexer.js";
import { changed } from "./store.js";
import { Component, CopyButton, html } from "./ui.js";

const MOST_CHARS = 200_000;
const MOST_DEPTH = 40;
const MOST_ELEMENTS = 5_000; // of a text; what follows stays as it is written
const SLOW_MS = 40;
const FRAME_MS = 100; // of splitting, after which the other texts wait for the next frame

const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

function plain(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([0-9a-f]{1,6})|(\w{2,4}));/gi, (whole, decimal, hexadecimal, name) => {
    const code = decimal ? Number(decimal) : hexadecimal ? parseInt(hexadecimal, 16) : null;
    if (code !== null) return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
    return NAMED[name] ?? whole;
  });
}

/** The address, if it is one that a link may lead to. */
export function safeAddress(address) {
  try {
    const { protocol, href } = new URL(plain(address));
    return ["https:", "http:", "mailto:"].includes(protocol) ? href : null;
  } catch {
    return null;
  }
}

function link(address, content) {
  const safe = safeAddress(address);
  if (safe === null) return html`<span class="no-link" title=${address.slice(0, 500)}>${content}</span>`;
  return html`<a href=${safe} title=${safe} target="_blank" rel="noopener noreferrer nofollow">${content}</a>`;
}

const all = (tokens, depth) => (tokens ?? []).map((token) => element(token, depth + 1));

function inside(token, depth) {
  return token.tokens?.length ? all(token.tokens, depth) : plain(token.text ?? token.raw);
}

const ELEMENTS = {
  plain: (token) => html`<span class="plain">${token.raw}</span>`,
  space: () => null,
  def: () => null,
  hr: () => html`<hr />`,
  br: () => html`<br />`,
  heading: (token, depth) => html`<${`h${Math.min(token.depth + 1, 6)}`}>${inside(token, depth)}<//>`,
  paragraph: (token, depth) => html`<p>${inside(token, depth)}</p>`,
  blockquote: (token, depth) => html`<blockquote>${all(token.tokens, depth)}</blockquote>`,
  strong: (token, depth) => html`<strong>${inside(token, depth)}</strong>`,
  em: (token, depth) => html`<em>${inside(token, depth)}</em>`,
  del: (token, depth) => html`<del>${inside(token, depth)}</del>`,
  codespan: (token) => html`<code>${token.text}</code>`,
  escape: (token) => plain(token.text),
  text: inside,
  link: (token, depth) => link(token.href, inside(token, depth)),
  image: (token) => link(token.href, `image: ${token.text || token.href.slice(0, 80)}`),
  checkbox: (token) => html`<input type="checkbox" checked=${token.checked} disabled aria-label="task" /> `,
  code: (token) => html`<${Code} text=${token.text} language=${token.lang ?? ""} />`,
  list: (token, depth) => {
    const items = token.items.map(
      (item) => html`<li class=${item.task ? "task" : null}>${all(item.tokens, depth)}</li>`,
    );
    return token.ordered
      ? html`<ol start=${token.start || 1}>
          ${items}
        </ol>`
      : html`<ul>
          ${items}
        </ul>`;
  },
  table: (token, depth) => {
    const cell = (tag) => (one, column) =>
      html`<${tag} class=${token.align[column] && `to-${token.align[column]}`}>${all(one.tokens, depth)}<//>`;
    return html`<div class="table">
      <table>
        <thead>
          <tr>
            ${token.header.map(cell("th"))}
          </tr>
        </thead>
        <tbody>
          ${token.rows.map(
            (row) =>
              html`<tr>
                ${row.map(cell("td"))}
              </tr>`,
          )}
        </tbody>
      </table>
    </div>`;
  },
};

let left = 0; // of MOST_ELEMENTS

function element(token, depth) {
  left -= 1 + (token.items?.length ?? 0) + (token.rows?.length ?? 0) * (token.header?.length ?? 0);
  if (left < 0) return ELEMENTS.plain({ raw: token.raw ?? token.text });
  const make = depth > MOST_DEPTH ? undefined : ELEMENTS[token.type];
  return make === undefined ? token.raw : make(token, depth); // HTML, too: as it is written
}

function Code({ text, language }) {
  return html`<div class="code">
    <div class="code-head"><span>${language.slice(0, 40)}</span><${CopyButton} text=${text} /></div>
    <pre tabindex="0"><code>${text}</code></pre>
  </div>`;
}

/** Elements for a text, or the text itself where splitting it fails. */
export function elements(text) {
  if (text.length > MOST_CHARS) return html`<pre class="plain">${text}</pre>`;
  left = MOST_ELEMENTS;
  try {
    return all(lex(text), 0);
  } catch {
    return html`<pre class="plain">${text}</pre>`;
  }
}

let spent = 0; // ms, in this frame

function spend(ms) {
  if (spent === 0) requestAnimationFrame(() => (spent = 0));
  spent += ms;
}

/** Drawn again only where the text is another. A text that takes long to split is split when it is complete, and where
 * there are many, as of a conversation that is opened, each frame splits some. */
export class Markdown extends Component {
  shouldComponentUpdate({ text, writing }) {
    return this.waits || text !== this.props.text || writing !== this.props.writing;
  }

  render({ text, writing }) {
    this.waits = spent > FRAME_MS;
    if (this.waits) changed();
    if (this.waits || (writing && this.slow)) return html`<div class="markdown"><pre class="plain">${text}</pre></div>`;
    const began = performance.now();
    const drawn = elements(text);
    const took = performance.now() - began;
    this.slow = took > SLOW_MS;
    spend(took);
    return html`<div class="markdown">${drawn}</div>`;
  }
}
