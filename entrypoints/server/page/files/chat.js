// The conversation that is open, and where the next message is written.

import { loadModels } from "./api.js";
import { Message } from "./message.js";
import { changed, state, update } from "./store.js";
import { isRunning, say, stop } from "./talk.js";
import { Component, Icon, createRef, html } from "./ui.js";

const NEAR_PX = 80;

export class Chat extends Component {
  scroll = createRef();
  follows = true; // the end stays in sight until the reader scrolls up

  onScroll = () => {
    const { scrollHeight, scrollTop, clientHeight } = this.scroll.current;
    const follows = scrollHeight - scrollTop - clientHeight < NEAR_PX;
    if (follows !== this.follows) {
      this.follows = follows;
      changed();
    }
  };

  toEnd = () => {
    this.follows = true;
    this.scroll.current.scrollTop = this.scroll.current.scrollHeight;
  };

  componentDidMount() {
    this.toEnd();
  }

  componentDidUpdate() {
    if (this.shown !== state.current) {
      this.shown = state.current;
      this.follows = true;
    }
    if (this.follows) this.toEnd();
  }

  render() {
    const conversation = state.current;
    const busy = isRunning(conversation);
    const count = conversation.messages.length;
    return html`<main class="chat" aria-label="Conversation">
      <div class="scroll" ref=${this.scroll} onScroll=${this.onScroll} tabindex="-1">
        <div class="column" role="log" aria-live="off" key=${conversation.id}>
          ${count === 0 && html`<${Welcome} />`}
          ${conversation.messages.map(
            (message, at) =>
              html`<${Message}
                key=${at}
                ...${{ message, conversation, at, busy, last: at === count - 1, writing: busy && at === count - 1 }}
              />`,
          )}
        </div>
      </div>
      ${
        !this.follows &&
        html`<button type="button" class="to-end" onClick=${this.toEnd}><${Icon} name="down" />Latest</button>`
      }
      <${Composer} key=${conversation.id} conversation=${conversation} busy=${busy} />
    </main>`;
  }
}

const IDEAS = [
  "Explain paged attention to a ten-year-old.",
  "Write a Python function that merges two sorted lists, with a test.",
  "List three rivers of Europe with their lengths, as a table.",
];

function Welcome() {
  const begin = (text) => say(state.current, text);
  return html`<div class="welcome">
    <h1>What shall we talk about?</h1>
    <p>
      ${state.model ? html`<b>${state.model}</b> answers here.` : "No model yet."} Conversations stay in this browser.
    </p>
    <div class="ideas">
      ${IDEAS.map(
        (idea) => html`<button type="button" disabled=${!state.model} onClick=${() => begin(idea)}>${idea}</button>`,
      )}
    </div>
  </div>`;
}

const NAMES = {
  temperature: "temperature",
  top_p: "top-p",
  top_k: "top-k",
  min_p: "min-p",
  max_tokens: "max",
  seed: "seed",
};

/** What is set, in a few words: nobody should wonder why an answer is JSON. */
function chips(settings) {
  const found = [];
  if (settings.system.trim()) found.push("system prompt");
  for (const [name, shown] of Object.entries(NAMES))
    if (settings[name] !== "") found.push(`${shown} ${settings[name]}`);
  if (settings.thinking) found.push(`thinking ${settings.thinking}`);
  if (settings.thinking_token_budget !== "") found.push(`thinks ≤ ${settings.thinking_token_budget}`);
  if (settings.stop) found.push("stop");
  if (settings.logprobs !== "") found.push("log-probabilities");
  if (settings.tools.trim()) found.push("tools");
  if (settings.schema.trim()) found.push("schema");
  return found;
}

class Composer extends Component {
  box = createRef();
  state = { text: "" };

  componentDidMount() {
    if (matchMedia("(min-width: 900px)").matches) this.box.current.focus();
  }

  componentDidUpdate() {
    const box = this.box.current;
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight, 260)}px`;
  }

  send = () => {
    const { conversation, busy } = this.props;
    const text = this.state.text;
    if (busy || !text.trim() || !state.model) return;
    this.setState({ text: "" });
    say(conversation, text);
  };

  keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.send();
    }
  };

  render({ conversation, busy }, { text }) {
    const set = chips(conversation.settings);
    return html`<div class="composer">
      ${
        state.offline &&
        html`<div class="error row" role="alert">
          ${state.offline}<button type="button" class="quiet" onClick=${loadModels}>
            <${Icon} name="redo" />Try again
          </button>
        </div>`
      }
      <form
        class="box"
        onSubmit=${(event) => {
          event.preventDefault();
          this.send();
        }}
      >
        <textarea
          ref=${this.box}
          rows="1"
          aria-label="Message"
          placeholder="Write a message"
          value=${text}
          onInput=${(event) => this.setState({ text: event.target.value })}
          onKeyDown=${this.keys}
        ></textarea>
        ${
          busy
            ? html`<button
                key="stop"
                type="button"
                class="send stop"
                aria-label="Stop"
                title="Stop (Esc)"
                onClick=${() => stop(conversation)}
              >
                <${Icon} name="stop" />
              </button>`
            : html`<button key="send" class="send" aria-label="Send" title="Send (Enter)" disabled=${!text.trim() || !state.model}>
                <${Icon} name="send" />
              </button>`
        }
      </form>
      <div class="under">
        <div class="chips">
          ${set.map(
            (chip) =>
              html`<button type="button" class="chip" onClick=${() => update({ drawer: "settings" })}>${chip}</button>`,
          )}
        </div>
        <span class="hint keys"><kbd>Enter</kbd> sends · <kbd>Shift Enter</kbd> new line · <kbd>Esc</kbd> stops</span>
      </div>
    </div>`;
  }
}
