// One message of a conversation: what was said, thinking folded, calls, tokens by their probability, and what it took.

import { Markdown } from "./markdown.js";
import { edit, giveResults, regenerate } from "./talk.js";
import { Tokens } from "./tokens.js";
import { Component, CopyButton, Icon, duration, html, short } from "./ui.js";

export class Message extends Component {
  state = { draft: null, tokens: false };

  render(props) {
    const { message } = props;
    if (message.role === "user") return this.state.draft === null ? this.user(props) : this.editor(props);
    if (message.role === "tool") return html`<${Result} message=${message} />`;
    return this.assistant(props);
  }

  user({ message, busy }) {
    return html`<article class="message user" aria-label="You">
      <div class="said">${message.content}</div>
      <div class="actions">
        <button type="button" class="quiet" disabled=${busy} onClick=${() => this.setState({ draft: message.content })}>
          <${Icon} name="edit" />Edit
        </button>
        <${CopyButton} text=${message.content} />
      </div>
    </article>`;
  }

  editor({ conversation, at }, { draft } = this.state) {
    const close = () => this.setState({ draft: null });
    const save = () => {
      if (!draft.trim()) return;
      close();
      edit(conversation, at, draft);
    };
    const keys = (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        save();
      }
      event.stopPropagation();
    };
    return html`<article class="message user editing" aria-label="You">
      <textarea
        aria-label="Your message"
        rows=${Math.min(12, draft.split("\n").length + 1)}
        value=${draft}
        ref=${(box) => box && !this.focused && ((this.focused = true), box.focus())}
        onInput=${(event) => this.setState({ draft: event.target.value })}
        onKeyDown=${keys}
      ></textarea>
      <div class="row end">
        <span class="hint">What follows is written anew.</span>
        <button type="button" class="plain-button" onClick=${close}>Cancel</button>
        <button type="button" class="main-button" onClick=${save}>Send</button>
      </div>
    </article>`;
  }

  componentDidUpdate() {
    if (this.state.draft === null) this.focused = false;
  }

  assistant({ message, conversation, at, writing, busy, last }) {
    const showsTokens = this.state.tokens && message.tokens;
    const empty = !message.content && !message.reasoning && !message.tool_calls.length;
    return html`<article class="message assistant" aria-label="Answer" aria-busy=${writing}>
      ${message.reasoning && html`<${Thinking} text=${message.reasoning} writing=${writing && !message.content} />`}
      ${
        showsTokens
          ? html`<${Tokens} tokens=${message.tokens} />`
          : message.content && html`<${Markdown} text=${message.content} writing=${writing} />`
      }
      ${writing && empty && html`<div class="waiting" role="img" aria-label="Waiting"><i></i><i></i><i></i></div>`}
      ${message.tool_calls.map((call) => html`<${Call} call=${call} />`)}
      ${
        message.tool_calls.length > 0 &&
        last &&
        !writing &&
        html`<${Results} calls=${message.tool_calls} give=${(results) => giveResults(conversation, results)} />`
      }
      ${message.error && html`<div class="error" role="alert">${message.error}</div>`}
      ${message.schema_error && html`<div class="error">It breaks the schema: ${message.schema_error}</div>`}
      ${
        !writing &&
        html`<div class="actions">
          <button type="button" class="quiet" disabled=${busy} onClick=${() => regenerate(conversation, at)}>
            <${Icon} name="redo" />Regenerate
          </button>
          ${message.content && html`<${CopyButton} text=${message.content} />`}
          ${
            message.tokens &&
            html`<button
              type="button"
              class="quiet"
              aria-pressed=${Boolean(showsTokens)}
              onClick=${() => this.setState({ tokens: !this.state.tokens })}
            >
              <${Icon} name="colours" />Tokens
            </button>`
          }
          <${Stats} stats=${message.stats} />
        </div>`
      }
    </article>`;
  }
}

function Thinking({ text, writing }) {
  return html`<details class="thinking">
    <summary>
      ${writing ? "Thinking …" : "Thinking"}<span class="hint">${short(text.length)} characters</span>
    </summary>
    <div class="thought">${text}</div>
  </details>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function Call({ call }) {
  return html`<section class="call" aria-label=${`Call of ${call.name}`}>
    <header><${Icon} name="tool" /><code>${call.name}</code><span class="hint">tool call</span></header>
    <pre tabindex="0">${pretty(call.arguments)}</pre>
  </section>`;
}

function Result({ message }) {
  return html`<section class="call result" aria-label="Result of a tool">
    <header><${Icon} name="tool" /><code>${message.name || "tool"}</code><span class="hint">result</span></header>
    <pre tabindex="0">${pretty(message.content)}</pre>
  </section>`;
}

class Results extends Component {
  state = { given: {} };

  render({ calls, give }, { given }) {
    const send = (event) => {
      event.preventDefault();
      give(calls.map((_, index) => given[index] ?? ""));
    };
    return html`<form class="results" onSubmit=${send}>
      ${calls.map(
        (call, index) =>
          html`<label>
            Result of <code>${call.name}</code>
            <textarea
              rows="2"
              placeholder="What the tool would say"
              value=${given[index] ?? ""}
              onInput=${(event) => this.setState({ given: { ...given, [index]: event.target.value } })}
            ></textarea>
          </label>`,
      )}
      <div class="row end"><button class="main-button">Go on</button></div>
    </form>`;
  }
}

const ENDS = { length: "cut at its limit", stopped: "stopped", tool_calls: "calls", content_filter: "filtered" };

function Stats({ stats }) {
  if (!stats) return null;
  const parts = [
    stats.tokens !== undefined && `${short(stats.tokens)} tokens`,
    stats.rate !== undefined && `${short(stats.rate)} tok/s`,
    stats.first_s !== undefined && `first after ${duration(stats.first_s)}`,
    stats.prompt !== undefined &&
      `prompt ${short(stats.prompt)}${stats.cached ? ` (${short(stats.cached)} cached)` : ""}`,
    stats.thought > 0 && `${short(stats.thought)} thought`,
    stats.accepted > 0 && `${short(stats.accepted)} drafted`,
    ENDS[stats.finish],
  ];
  return html`<span class="stats">${parts.filter(Boolean).map((part) => html`<span>${part}</span>`)}</span>`;
}
