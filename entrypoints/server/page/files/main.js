// The page as a whole: its bar, the views side by side, keys, and the question for the API key.

import { giveKey, loadModels, refuseKey } from "./api.js";
import { Board } from "./board.js";
import { Chat } from "./chat.js";
import { load } from "./conversations.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { followAddress, nextTheme, onChange, recall, setTheme, show, state, update } from "./store.js";
import { stop } from "./talk.js";
import { Component, IconButton, html, render } from "./ui.js";

const VIEWS = [
  ["chat", "Chat"],
  ["both", "Both"],
  ["board", "Board"],
];

function Bar() {
  const drawer = (name) => () => update({ drawer: state.drawer === name ? null : name });
  const theme = { auto: "auto", light: "sun", dark: "moon" }[state.theme];
  return html`<header class="bar">
    ${
      state.view !== "board" &&
      html`<${IconButton} icon="menu" label="Conversations" kind="only-narrow" onClick=${drawer("conversations")} />`
    }
    <div class="brand">
      <img src="page/icon.svg" alt="" width="22" height="22" /><b>Pageloom</b
      ><span class="model">${state.model ?? ""}</span>
    </div>
    <nav class="views" aria-label="Views">
      ${VIEWS.map(
        ([view, label]) =>
          html`<a
            href=${`#${view}`}
            class=${`view-link to-${view}`}
            aria-current=${state.view === view ? "page" : null}
            onClick=${(event) => {
              event.preventDefault();
              show(view);
            }}
            >${label}</a
          >`,
      )}
    </nav>
    <div class="bar-end">
      <${IconButton} icon=${theme} label=${`Colours: ${state.theme}`} onClick=${nextTheme} />
      ${
        state.view !== "board" &&
        html`<${IconButton}
          icon="sliders"
          label="Settings"
          pressed=${state.drawer === "settings"}
          onClick=${drawer("settings")}
        />`
      }
    </div>
  </header>`;
}

class KeyDialog extends Component {
  open = (dialog) => {
    if (dialog && !dialog.open) dialog.showModal();
  };

  render() {
    const submit = (event) => {
      event.preventDefault();
      const form = new FormData(event.target);
      const key = form.get("key").trim();
      if (key) giveKey(key, form.has("keep"));
    };
    return html`<dialog
      class="key"
      ref=${this.open}
      onCancel=${(event) => (event.preventDefault(), refuseKey())}
      aria-labelledby="key-title"
    >
      <form onSubmit=${submit}>
        <h2 id="key-title">API key</h2>
        <p>${state.key.refused ? "The server refused that key." : "This server lets in who has its key."}</p>
        <label for="key">Key</label>
        <input id="key" name="key" type="password" autocomplete="current-password" autofocus required />
        <label class="check"><input type="checkbox" name="keep" /> Keep it in this browser</label>
        <p class="hint">Otherwise it is forgotten with this tab. It is sent to this server only.</p>
        <div class="row end">
          <button type="button" class="plain-button" onClick=${refuseKey}>Cancel</button>
          <button class="main-button">Use it</button>
        </div>
      </form>
    </dialog>`;
  }
}

class Page extends Component {
  componentDidMount() {
    onChange(() => this.setState({}));
  }

  render() {
    const { view, drawer } = state;
    const closes = drawer && html`<div class=${`shade for-${drawer}`} onClick=${() => update({ drawer: null })}></div>`;
    return html`<div class=${`page view-${view}`}>
      <${Bar} />
      <div class="views-body">
        ${view !== "board" && html`<${Sidebar} /><${Chat} />`} ${view !== "chat" && html`<${Board} />`}
        ${view !== "board" && html`<${Settings} />`} ${closes}
      </div>
      ${state.key && html`<${KeyDialog} />`}
      <div class="hidden" role="status" aria-live="polite">${state.said}</div>
    </div>`;
  }
}

addEventListener("hashchange", followAddress);
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || state.key) return;
  if (state.drawer) update({ drawer: null });
  else stop(state.current);
});

setTheme(recall("theme"));
load();
followAddress();
render(html`<${Page} />`, document.getElementById("app"));
loadModels();
