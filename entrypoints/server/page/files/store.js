// What the page knows, in one place. Whoever changes it calls `changed`; the page is drawn again before the next frame,
// and not at all while it is hidden.

export const state = {
  view: "chat",
  theme: "auto",
  drawer: null, // "conversations" | "settings" | null; which drawer is open where there is no room for both
  models: [],
  model: null,
  offline: null, // why the server cannot be talked to
  current: null, // the conversation that is shown
  conversations: [],
  key: null, // { refused } while the key is asked for
  said: "", // for screen readers
};

let listener = null;
let asked = false;

export function onChange(callback) {
  listener = callback;
}

export function changed() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    listener?.();
  });
}

export function update(values) {
  Object.assign(state, values);
  changed();
}

/** What the browser keeps, for the tab alone or for longer. It may refuse that altogether, or be full. */
export function recall(name, { tab = false } = {}) {
  try {
    return (tab ? sessionStorage : localStorage).getItem(`pageloom.${name}`);
  } catch {
    return null;
  }
}

/** null: it is forgotten. False: it could not be kept. */
export function remember(name, value, { tab = false } = {}) {
  try {
    const storage = tab ? sessionStorage : localStorage;
    if (value === null) storage.removeItem(`pageloom.${name}`);
    else storage.setItem(`pageloom.${name}`, value);
    return true;
  } catch {
    return false;
  }
}

const VIEWS = ["chat", "both", "board"];

export function show(view) {
  location.replace(`#${view}`);
}

export function followAddress() {
  const view = location.hash.slice(1);
  update({ view: VIEWS.includes(view) ? view : "chat", drawer: null });
}

const THEMES = ["auto", "light", "dark"];

export function setTheme(theme) {
  const known = THEMES.includes(theme) ? theme : "auto";
  if (known === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = known;
  remember("theme", known === "auto" ? null : known);
  update({ theme: known });
}

export function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(state.theme) + 1) % THEMES.length]);
}
