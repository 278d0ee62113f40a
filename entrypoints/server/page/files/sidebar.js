// The conversations that this browser keeps.

import { MOST_FILE_BYTES, create, exportAll, importText, open, remove, rename, titleOf } from "./conversations.js";
import { state, update } from "./store.js";
import { isRunning, stop } from "./talk.js";
import { Component, Icon, IconButton, createRef, html } from "./ui.js";

export class Sidebar extends Component {
  file = createRef();
  state = { renaming: null, trouble: null };

  bring = async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    try {
      if (file.size > MOST_FILE_BYTES) throw new Error("it is larger than 50 MB");
      const { imported, left } = importText(await file.text());
      this.setState({ trouble: left ? `${file.name}: there was no room for ${left} of ${imported + left}` : null });
      update({ said: `${imported} conversations imported.` });
    } catch (error) {
      this.setState({ trouble: `${file.name}: ${error.message}` });
    }
  };

  render(_, { renaming, trouble }) {
    return html`<aside
      class=${`sidebar ${state.drawer === "conversations" ? "is-open" : ""}`}
      aria-label="Conversations"
    >
      <div class="sidebar-head">
        <button type="button" class="new" onClick=${create}><${Icon} name="plus" />New conversation</button>
        <${IconButton}
          icon="close"
          label="Close the list"
          kind="only-drawer"
          onClick=${() => update({ drawer: null })}
        />
      </div>
      <ul class="conversations">
        ${state.conversations.map((conversation) =>
          conversation === renaming ? this.renamer(conversation) : this.entry(conversation),
        )}
      </ul>
      ${trouble && html`<div class="error" role="alert">${trouble}</div>`}
      <div class="sidebar-foot">
        <button type="button" class="quiet" onClick=${() => this.file.current.click()}>
          <${Icon} name="upload" />Import
        </button>
        <button type="button" class="quiet" onClick=${exportAll}><${Icon} name="download" />Export</button>
        <input
          ref=${this.file}
          type="file"
          accept="application/json,.json"
          class="hidden"
          aria-label="File to import"
          onChange=${this.bring}
          tabindex="-1"
        />
      </div>
    </aside>`;
  }

  entry(conversation) {
    const here = conversation === state.current;
    const title = titleOf(conversation);
    return html`<li key=${conversation.id} class=${here ? "here" : null}>
      <button
        type="button"
        class="open"
        aria-current=${here ? "true" : null}
        title=${title}
        onClick=${() => open(conversation)}
      >
        ${isRunning(conversation) && html`<i class="pulse" aria-hidden="true"></i>`}${title}
      </button>
      <${IconButton}
        icon="edit"
        label=${`Rename ${title}`}
        onClick=${() => this.setState({ renaming: conversation })}
      />
      <${IconButton} icon="trash" label=${`Delete ${title}`} onClick=${() => this.drop(conversation, title)} />
    </li>`;
  }

  drop(conversation, title) {
    if (conversation.messages.length && !confirm(`Delete “${title}”?`)) return;
    stop(conversation);
    remove(conversation);
  }

  renamer(conversation) {
    const done = (event) => {
      if (this.state.renaming === null) return;
      this.setState({ renaming: null });
      rename(conversation, event.target.value);
    };
    const keys = (event) => {
      if (event.key === "Enter") done(event);
      if (event.key === "Escape") this.setState({ renaming: null });
      event.stopPropagation();
    };
    return html`<li key=${conversation.id} class="here">
      <input
        class="rename"
        aria-label="Name of the conversation"
        value=${titleOf(conversation)}
        ref=${(box) => box?.focus()}
        onKeyDown=${keys}
        onBlur=${done}
      />
    </li>`;
  }
}
