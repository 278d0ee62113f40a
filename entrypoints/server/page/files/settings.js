// How the open conversation is sampled, and what its answers must be. What is left empty is the model's own.

import { DEFAULTS, save } from "./conversations.js";
import { changed, remember, state, update } from "./store.js";
import { complaint } from "./talk.js";
import { forgetKey, hasKey } from "./api.js";
import { Component, Icon, IconButton, html } from "./ui.js";

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top-p", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top-k", { min: 0, step: 1 }],
  ["min_p", "Min-p", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Most tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
];

const TOOLS = `[
  {
    "name": "get_weather",
    "description": "The weather in a city, now",
    "parameters": {
      "type": "object",
      "properties": { "city": { "type": "string" } },
      "required": ["city"]
    }
  }
]`;

const SCHEMA = `{
  "type": "object",
  "properties": {
    "name": { "type": "string" },
    "age": { "type": "integer" }
  },
  "required": ["name", "age"],
  "additionalProperties": false
}`;

export class Settings extends Component {
  set(name, value) {
    const { current } = state;
    current.settings[name] = value;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => save(current), 500);
    changed();
  }

  field(name, label, options) {
    const id = `setting-${name}`;
    return html`<div class="field">
      <label for=${id}>${label}</label>
      <input
        id=${id}
        type="number"
        placeholder="model’s own"
        ...${options}
        value=${state.current.settings[name]}
        onInput=${(event) => this.set(name, event.target.value)}
      />
    </div>`;
  }

  text(name, label, { rows, hint, example, mono = false }) {
    const id = `setting-${name}`;
    const value = state.current.settings[name];
    const wrong = example ? complaint(name, value) : null;
    return html`<div class="field wide">
      <label for=${id}>${label}</label>
      <textarea
        id=${id}
        class=${mono ? "mono" : null}
        rows=${rows}
        spellcheck=${!mono}
        placeholder=${hint}
        aria-invalid=${wrong !== null}
        value=${value}
        onInput=${(event) => this.set(name, event.target.value)}
      ></textarea>
      ${wrong && html`<div class="error">${wrong}</div>`}
      ${example &&
      !value &&
      html`<button type="button" class="quiet" onClick=${() => this.set(name, example)}>Insert an example</button>`}
    </div>`;
  }

  choice(name, label, options) {
    const id = `setting-${name}`;
    return html`<div class="field">
      <label for=${id}>${label}</label>
      <select id=${id} value=${state.current.settings[name]} onChange=${(event) => this.set(name, event.target.value)}>
        ${options.map(([value, shown]) => html`<option value=${value}>${shown}</option>`)}
      </select>
    </div>`;
  }

  render() {
    if (state.drawer !== "settings") return null;
    return html`<aside class="settings" aria-label="Settings">
      <header>
        <h2>Settings</h2>
        <${IconButton} icon="close" label="Close settings" onClick=${() => update({ drawer: null })} />
      </header>
      <div class="settings-body">
        <div class="fields">
          ${state.models.length > 1 && html`<${ModelChoice} />`}
          ${this.text("system", "System prompt", { rows: 3, hint: "How the model should behave" })}
          ${NUMBERS.map(([name, label, options]) => this.field(name, label, options))}
          ${this.choice("thinking", "Thinking", [
            ["", "model’s own"],
            ["on", "on"],
            ["off", "off"],
          ])}
          ${this.field("thinking_token_budget", "Thinking, at most", { min: 0, step: 1 })}
          ${this.choice("logprobs", "Log-probabilities", [
            ["", "off"],
            ["0", "of the token"],
            ["3", "and 3 others"],
            ["5", "and 5 others"],
            ["10", "and 10 others"],
          ])}
          ${this.text("stop", "Stop at (a line each)", { rows: 1, hint: "" })}
          ${this.text("schema", "Schema of the answer", { rows: 5, hint: "JSON Schema", example: SCHEMA, mono: true })}
          <label class="check">
            <input
              type="checkbox"
              checked=${state.current.settings.strict}
              onChange=${(event) => this.set("strict", event.target.checked)}
            />
            Refuse what of a schema cannot be enforced
          </label>
          ${this.text("tools", "Tools", { rows: 5, hint: "JSON list of functions", example: TOOLS, mono: true })}
        </div>
        <div class="row end">
          ${hasKey() &&
          html`<button type="button" class="quiet" onClick=${() => (forgetKey(), changed())}>
            <${Icon} name="key" />Forget the key
          </button>`}
          <button type="button" class="quiet" onClick=${this.reset}><${Icon} name="redo" />Back to defaults</button>
        </div>
      </div>
    </aside>`;
  }

  reset = () => {
    state.current.settings = { ...DEFAULTS };
    save(state.current);
  };
}

function ModelChoice() {
  const choose = (event) => {
    remember("model", event.target.value);
    update({ model: event.target.value });
  };
  return html`<div class="field wide">
    <label for="model">Model</label>
    <select id="model" value=${state.model} onChange=${choose}>
      ${state.models.map(({ id }) => html`<option value=${id}>${id}</option>`)}
    </select>
  </div>`;
}
