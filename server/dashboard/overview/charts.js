// The last 15 minutes as small charts of one kind, drawn by uPlot.

import { percent, rate, seconds, short } from "../parts/format.js";
import { Component, html } from "../parts/html.js";
import { SECONDS_SHOWN } from "../state/activity.js";

const HEIGHT = 92;
const LEAST_SECONDS = 60;
const CHARTS = [
  { title: "Throughput", unit: "generated tokens a second", lines: ["written"], say: rate, least: 10 },
  { title: "Prompts", unit: "tokens a second; not cached (dashed)",
    lines: ["prompt", "computed"], say: short, least: 10 },
  { title: "Hit share", unit: "share of prompt tokens that were cached", lines: ["hitShare"],
    say: percent, least: 1 },
  { title: "First token", unit: "mean time from request to first token", lines: ["firstToken"],
    say: seconds, least: 0.1 },
  { title: "Queue", unit: "requests running; waiting (dashed)", lines: ["running", "waiting"],
    say: rate, least: 4 },
  { title: "Evictions", unit: "evicted blocks a second", lines: ["evictions"],
    say: rate, least: 4 },
];

/** `series`: columns of one length, another object whenever there is another point. */
export function Charts({ series }) {
  return html`
    <div class="charts">
      ${CHARTS.map((chart) => html`
        <${Chart} key=${chart.title} chart=${chart} columns=${series} />`)}
    </div>`;
}

class Chart extends Component {
  componentDidMount() {
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.draw();
    this.dark.addEventListener("change", this.redraw);
    this.observer = new ResizeObserver(this.redraw);
    this.observer.observe(this.element);
  }

  shouldComponentUpdate({ columns }) {
    return columns !== this.props.columns;
  }

  componentDidUpdate() {
    this.plot?.setData(this.data());
  }

  componentWillUnmount() {
    this.dark.removeEventListener("change", this.redraw);
    this.observer.disconnect();
    this.plot?.destroy();
  }

  render({ chart, columns }) {
    const values = columns[chart.lines[0]];
    const last = values.findLast((value) => value !== null);
    return html`
      <figure>
        <figcaption><b>${chart.title}</b> <span class="now">${last == null ? "–" : chart.say(last)}
          </span><small>${chart.unit}</small></figcaption>
        <div class="plot" role="img" ref=${(element) => (this.element = element)}
             aria-label="${chart.title} in the last 15 minutes, ${chart.unit}"></div>
      </figure>`;
  }

  data() {
    const { chart, columns } = this.props;
    return [columns.time, ...chart.lines.map((name) => columns[name])];
  }

  draw() {
    this.plot?.destroy();
    const width = Math.floor(this.element.clientWidth);
    if (width > 0) this.plot = new uPlot(this.options(width), this.data(), this.element);
  }

  /** From the first point on, as long as that is not too short, to the last. */
  span() {
    const { time } = this.props.columns;
    const last = time.at(-1) ?? Date.now() / 1000;
    const seconds = last - (time[0] ?? last);
    return [last - Math.min(SECONDS_SHOWN, Math.max(LEAST_SECONDS, seconds)), last];
  }

  options(width) {
    const styles = getComputedStyle(this.element);
    const colour = (name) => styles.getPropertyValue(name).trim();
    const axis = {
      stroke: colour("--muted"), font: `11px ${styles.fontFamily}`, ticks: { show: false },
    };
    const { chart } = this.props;
    const dots = (plot, index) => isLonely(plot.data[index]);
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      cursor: { show: false },
      padding: [6, 4, 0, 0],
      scales: {
        x: { range: () => this.span() },
        y: { range: (plot, least, most) => [0, Math.max(chart.least, most ?? 0) * 1.05] },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 20, space: 70 },
        { ...axis, grid: { stroke: colour("--line"), width: 1 }, size: 44, space: 28,
          values: (plot, ticks) => ticks.map(chart.say) },
      ],
      series: [{}, ...chart.lines.map((name, index) => ({
        stroke: colour("--accent"),
        width: 1.5,
        dash: index ? [3, 3] : undefined,
        fill: index ? undefined : colour("--accent-faint"),
        points: { show: dots, size: 4, fill: colour("--accent") },
      }))],
    };
  }
}

/** Whether values stand between gaps, where a line alone would show nothing. */
function isLonely(values) {
  return values.some((value, index) => value !== null &&
    (values[index - 1] ?? null) === null && (values[index + 1] ?? null) === null);
}
