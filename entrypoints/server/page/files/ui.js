// What every part of the page is made of: preact without its hooks, which would need an import map, which the policy
// forbids.

import htm from "./vendor/htm.mjs";
import { Component, createRef, h, render } from "./vendor/preact.mjs";

export const html = htm.bind(h);
export { Component, createRef, render };

const PATHS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  send: "M12 19V6M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  redo: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  trash: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12",
  sliders: "M4 7h9M17 7h3M15 5a2 2 0 1 0 0 4 2 2 0 0 0 0-4M4 17h3M11 17h9M9 15a2 2 0 1 0 0 4 2 2 0 0 0 0-4",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 3v2M12 19v2M3 12h2M19 12h2M6 6l1 1M17 17l1 1M18 6l-1 1M7 17l-1 1",
  moon: "M19 14.5A7.5 7.5 0 0 1 9.5 5a7.5 7.5 0 1 0 9.5 9.5z",
  auto: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  down: "M12 5v13M6 13l6 6 6-6",
  upload: "M12 16V5M7 10l5-5 5 5M5 19h14",
  download: "M12 5v11M7 11l5 5 5-5M5 19h14",
  colours: "M5 7h6M5 12h14M5 17h9M15 7h4",
  key: "M14 10a4 4 0 1 0-1.2 2.8L15 15h2v2h2v2h2v-3l-6.2-6.2",
  tool: "M9 4C6 4 7 8 7 10s-2 2-2 2 2 0 2 2-1 6 2 6M15 4c3 0 2 4 2 6s2 2 2 2-2 0-2 2 1 6-2 6",
};

export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
}

/** A button of an icon alone; `label` is what it is called. */
export function IconButton({ icon, label, onClick, disabled, pressed, kind = "" }) {
  return html`<button
    type="button"
    class=${`icon-button ${kind}`}
    aria-label=${label}
    title=${label}
    aria-pressed=${pressed}
    disabled=${disabled}
    onClick=${onClick}
  >
    <${Icon} name=${icon} />
  </button>`;
}

/** Also where the page came over plain HTTP from another machine: there browsers have no clipboard but this old way. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = Object.assign(document.createElement("textarea"), { value: text, className: "hidden" });
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  return box.remove();
}

/** Copies a text and says so for a moment. */
export class CopyButton extends Component {
  state = { done: false };

  copy = async () => {
    await copy(this.props.text);
    this.setState({ done: true });
    this.timer = setTimeout(() => this.setState({ done: false }), 1500);
  };

  componentWillUnmount() {
    clearTimeout(this.timer);
  }

  render({ label = "Copy" }, { done }) {
    return html`<button type="button" class="quiet" onClick=${this.copy}>
      <${Icon} name="copy" />${done ? "Copied" : label}
    </button>`;
  }
}

/** 1234567 → "1.23 M"; three digits are enough to see something change. */
export function short(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const [scale, name] = value >= 1e9 ? [1e9, " G"] : value >= 1e6 ? [1e6, " M"] : value >= 1e4 ? [1e3, " k"] : [1, ""];
  const scaled = value / scale;
  const digits = scaled >= 100 || Number.isInteger(scaled) ? 0 : scaled >= 10 ? 1 : 2;
  return `${scaled.toFixed(digits)}${name}${unit && ` ${unit}`}`;
}

/** Seconds in the unit that suits them. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0995) return `${(seconds * 1e3).toFixed(seconds < 0.00995 ? 2 : 1)} ms`;
  return seconds < 0.9995 ? `${(seconds * 1e3).toFixed(0)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}
