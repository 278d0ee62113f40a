// uPlot in our colours: lines over the last minutes, and a legend with the values under the pointer, else the last.

import uPlot from "./vendor/uPlot.esm.js";
import { Component, createRef, html } from "./ui.js";

/** What a variable of the style is as a colour; canvases know no variables. */
function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const WINDOW_S = 300;
/** Of counts. */
const INCREMENTS = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
const FONT = "11px system-ui, sans-serif";

/**
 * props: `label`, `series` ([label, variable of the colour, format]), `data` (columns), `least` (what the scale shows
 * at least), `height`, `theme`.
 */
export class Chart extends Component {
  place = createRef();
  state = { at: null };

  componentDidMount() {
    this.draw();
    this.watch = new ResizeObserver(() => {
      const width = this.place.current.clientWidth;
      if (width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.props.height });
    });
    this.watch.observe(this.place.current);
    this.media = matchMedia("(prefers-color-scheme: dark)");
    this.media.addEventListener("change", this.redraw);
  }

  componentWillUnmount() {
    this.watch.disconnect();
    this.media.removeEventListener("change", this.redraw);
    this.plot.destroy();
  }

  componentDidUpdate(before) {
    if (before.theme !== this.props.theme) this.redraw();
    else if (before.data !== this.props.data) this.plot.setData(this.props.data);
  }

  redraw = () => {
    this.plot.destroy();
    this.draw();
  };

  draw() {
    const { series, data, height, least } = this.props;
    const [line, muted] = [colour("line"), colour("muted")];
    const whole = least >= 1 ? INCREMENTS : undefined;
    const axis = { stroke: muted, font: FONT, grid: { stroke: line, width: 1 }, ticks: { show: false } };
    const format = series[0][2];
    const options = {
      width: this.place.current.clientWidth || 300,
      height,
      legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
      padding: [8, 14, 0, 0],
      scales: {
        x: { range: (_, least, most) => [Math.min(least ?? 0, (most ?? 0) - WINDOW_S), most ?? 0] },
        y: { range: (_, __, most) => [0, Math.max(most * 1.08, least)] },
      },
      axes: [
        { ...axis, size: 24, splits: minutes, values: (_, times) => times.map((at) => minutesAgo(times.at(-1) - at)) },
        {
          ...axis,
          size: 48,
          space: 28,
          incrs: whole,
          values: (_, at) => at.map((value) => (value ? format(value) : "0")),
        },
      ],
      series: [
        {},
        ...series.map(([, variable], i) => ({
          stroke: colour(variable),
          width: 1.75,
          fill: i === 0 ? faint(colour(variable)) : undefined,
          points: { show: false },
          spanGaps: false,
        })),
      ],
      hooks: { setCursor: [(plot) => this.setState({ at: plot.cursor.idx ?? null })] },
    };
    this.plot = new uPlot(options, data, this.place.current);
  }

  render({ label, series, data }, { at }) {
    const shown = at ?? data[0].length - 1;
    return html`<figure class="chart" aria-label=${label}>
      <figcaption>
        <span class="chart-label">${label}</span>
        ${series.map(
          ([name, variable, format], i) =>
            html`<span class="chart-key"
              ><i class=${`key-${variable}`}></i>${name} <b>${format(data[i + 1][shown] ?? null)}</b></span
            >`,
        )}
      </figcaption>
      <div class="plot" ref=${this.place}></div>
    </figure>`;
  }
}

const faint = (rgb) => rgb.replace(/^rgb\((.*)\)$/, "rgba($1, 0.1)");

const minutes = (_, __, ___, most) => Array.from({ length: WINDOW_S / 60 + 1 }, (____, i) => most - WINDOW_S + 60 * i);

const minutesAgo = (seconds) =>
  seconds < 1 ? "now" : `−${Math.round(seconds / 60)}${seconds > WINDOW_S - 30 ? " min" : ""}`;
