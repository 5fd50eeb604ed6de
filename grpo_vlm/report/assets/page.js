// Puts the page together: facts and tiles, the curves, the configuration, the keys.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const SINGLE = RUNS.length === 1;

// [step, value] of the steps that have the metric
for (const run of RUNS) {
  run.points = {};
  for (const [name, values] of Object.entries(run.metrics)) {
    const points = values.flatMap((value, i) => (value == null ? [] : [[run.steps[i], value]]));
    if (points.length) run.points[name] = points;
  }
}
const NAMES = [...new Set(RUNS.flatMap((run) => Object.keys(run.points)))].sort();

const NOT_PARTS = ["overall", "not_scored", "errors", "timeouts", "crashes", "slowest_s"].map((name) => `reward/${name}`);
const OUTSIDE = ["step", "validation", "save_checkpoint"].map((name) => `timing_s/${name}`);

// [title, what it tells, metrics or a test of names, options]; a metric's label is its end unless given as "name=label"
const SECTIONS = [
  ["Reward", [
    ["Reward", "mean score of the training answers, and of the held-out ones", ["reward/overall=training", "val/reward_score=held-out"]],
    ["Reward parts", "mean of each part that the reward returns", (name) => name.startsWith("reward/") && !NOT_PARTS.includes(name)],
    ["Held-out parts", "mean of each part on the held-out rows", (name) => /^val\/.*_reward$/.test(name) && name !== "val/overall_reward"],
    ["Several answers", "to each held-out row: their mean, the majority, the best", (name) => /^val\/(mean|maj|best)@/.test(name)],
    ["Within a group", "best answer of a group and spread of its answers", ["group/reward_best=best", "group/reward_std=spread"]],
    ["Groups with equal scores", "share of groups that teach nothing", ["group/zero_variance_share=share"]],
    ["Advantages", "extremes over the step's answers", ["critic/advantages/max=largest", "critic/advantages/min=smallest"]],
  ]],
  ["Policy", [
    ["KL to the reference", "how far the policy has moved", ["actor/kl_loss=KL", "actor/kl_penalty=KL penalty"]],
    ["KL to the old policy", "moved within the step, by its updates", ["actor/ppo_kl=KL"]],
    ["Entropy", "near zero: the answers to a prompt are all alike", ["actor/entropy=entropy", "actor/entropy_loss=mean −log p"]],
    ["Clip fractions", "share of tokens whose ratio was clipped", ["actor/pg_clipfrac_higher=above", "actor/pg_clipfrac_lower=below"]],
    ["Reward faults", "answers without a score, calls that failed or ran out of time", ["reward/not_scored=not scored", "reward/errors=errors", "reward/timeouts=timeouts", "reward/crashes=crashes"], { quiet: true }],
    ["Gradient norm", "before clipping", ["actor/grad_norm=norm"]],
    ["Policy loss", "", ["actor/pg_loss=loss"]],
    ["Learning rate", "", ["actor/lr=rate"]],
    ["Sampler and trainer", "difference of their log-probs: large means that they disagree on the model", ["rollout/logprob_diff/mean=mean", "rollout/logprob_diff/max=max"]],
  ]],
  ["Lengths", [
    ["Response length", "tokens", ["response_length/mean=mean", "response_length/max=max", "response_length/min=min"]],
    ["Cut-off answers", "share that reaches the length limit", ["response_length/clip_ratio=training", "val_response_length/clip_ratio=held-out"]],
    ["Prompt length", "tokens", ["prompt_length/mean=mean", "prompt_length/max=max"]],
  ]],
  ["Time and memory", [
    ["Seconds by phase", "stacked, validation and saving left out", (name) => name.startsWith("timing_s/") && !OUTSIDE.includes(name), { stacked: true }],
    ["Validation and saving", "seconds", ["timing_s/validation=validation", "timing_s/save_checkpoint=saving"]],
    ["Seconds per step", "validation and saving left out", ["perf/time_per_step=seconds"]],
    ["Tokens per second", "and device, prompts and answers", ["perf/throughput=tokens/s"]],
    ["Rollouts per second", "and device", ["perf/rollouts_per_s_per_gpu=rollouts/s"]],
    ["Memory", "GiB: peak of the device, the machine's own", ["perf/max_memory_allocated_gb=allocated", "perf/max_memory_reserved_gb=reserved", "perf/cpu_memory_used_gb=machine"]],
    ["MFU", "share of the device's peak", (name) => name.startsWith("perf/mfu")],
  ]],
];
const TILES = [
  ["Reward", "reward/overall", 1], ["Held-out score", "val/reward_score", 1], ["Response length", "response_length/mean", 0],
  ["Entropy", "actor/entropy_loss", 0], ["Seconds per step", "perf/time_per_step", 0], ["Rollouts/s per device", "perf/rollouts_per_s_per_gpu", 0],
];

function chart([title, note, wanted, options = {}]) {
  const picked = typeof wanted === "function" ? NAMES.filter(wanted).map((name) => [name, name.split("/").slice(1).join("/")])
    : wanted.map((text) => text.split("="));
  const present = picked.filter(([name]) => RUNS.some((run) => run.points[name]));
  const series = RUNS.flatMap((run, r) => present.flatMap(([name, label], m) => {
    if (!run.points[name]) return [];
    if (SINGLE) return [{ name: label ?? name, points: run.points[name], color: m % PALETTE }];
    return [{ name: present.length > 1 || typeof wanted === "function" ? `${run.name}: ${label}` : run.name, points: run.points[name], color: r % PALETTE, dash: m % 4 }];
  }));
  if (!series.length || (options.quiet && series.every((one) => one.points.every(([, value]) => value === 0)))) return null;
  const stacked = options.stacked && SINGLE;
  if (stacked) {  // a phase that a step did not have took no time
    const steps = RUNS[0].points["timing_s/step"]?.map(([step]) => step).filter((step) => step > 0) ?? [];
    for (const one of series) {
      const values = new Map(one.points);
      one.points = steps.map((step) => [step, values.get(step) ?? 0]);
    }
    if (!steps.length) return null;
  }
  for (const [name] of present) seen.add(name);
  return new Chart({ title, note, series, stacked }).node;
}
const seen = new Set();

function drawCurves() {
  document.getElementById("charts").replaceChildren(...SECTIONS.flatMap(([title, charts]) => {
    const nodes = charts.map(chart).filter(Boolean);
    return nodes.length ? [el("h3", {}, title), el("div", { class: "grid" }, ...nodes)] : [];
  }));
  const rest = NAMES.filter((name) => !seen.has(name));
  const details = document.getElementById("everything"), filter = document.getElementById("metric-filter");
  details.hidden = !rest.length;
  details.querySelector("summary").textContent = `The other ${rest.length} metrics`;
  let nodes = null;
  const apply = () => nodes.forEach(([name, node]) => { node.hidden = !name.includes(filter.value); });
  details.addEventListener("toggle", () => {
    if (nodes) return;  // drawn when first opened
    nodes = rest.map((name) => [name, chart([name, "", [`${name}=last`]])]);
    document.getElementById("other-charts").replaceChildren(...nodes.map(([, node]) => node));
  });
  filter.addEventListener("input", apply);
  const smooth = document.getElementById("smooth"), told = document.getElementById("smooth-value");
  smooth.addEventListener("input", () => {
    Chart.weight = +smooth.value;
    told.textContent = Chart.weight ? Chart.weight.toFixed(2) : "off";
    Chart.redraw();
  });
}

function duration(seconds) {
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  return hours ? `${hours} h ${String(minutes).padStart(2, "0")} min` : minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

function drawOverview() {
  document.getElementById("runs").replaceChildren(...RUNS.map((run, r) => {
    const last = run.steps.at(-1) ?? 0, spent = (run.points["timing_s/step"] ?? []).reduce((sum, [, value]) => sum + value, 0);
    const fact = (label, value) => (value == null || value === "" ? null : el("span", { class: "fact" }, `${label} `, el("b", {}, String(value))));
    const final = (name) => (run.points[name] ? show(run.points[name].at(-1)[1]) : null);
    return el("div", { class: "runs-line" },
      el("strong", {}, SINGLE ? null : el("span", { class: "swatch", style: `background: var(--c${r % PALETTE})` }), run.name),
      fact("step", run.total ? `${last} of ${run.total}` : last), fact("time", spent ? duration(spent) : null),
      fact("model", run.config["worker.actor.model.model_path"]), fact("estimator", run.config["algorithm.adv_estimator"]),
      fact("per step", `${run.config["data.rollout_batch_size"] ?? "?"} prompts × ${run.config["worker.rollout.n"] ?? "?"} answers`),
      SINGLE ? null : fact("reward", final("reward/overall")), SINGLE ? null : fact("held-out", final("val/reward_score")));
  }));
  if (!SINGLE) return;
  document.getElementById("tiles").replaceChildren(...TILES.flatMap(([label, name, better], i) => {
    const points = RUNS[0].points[name];
    if (!points) return [];
    const [first, last] = [points[0], points.at(-1)], change = last[1] - first[1];
    const told = points.length < 2 ? "" : el("span", { class: better && change ? (change > 0 ? "up" : "down") : "" }, `${change >= 0 ? "+" : "−"}${show(Math.abs(change))}`);
    return [el("div", { class: "tile" }, el("div", { class: "label" }, label), el("div", { class: "value" }, show(last[1])),
      el("div", { class: "change" }, told, points.length < 2 ? `step ${last[0]}` : ` since step ${first[0]}`), points.length > 2 ? sparkline(points, i) : "")];
  }));
}

function drawConfig() {
  const keys = [...new Set(RUNS.flatMap((run) => Object.keys(run.config)))];
  const text = (value) => (value === undefined ? "-" : typeof value === "string" ? value : JSON.stringify(value));
  const all = document.getElementById("config-all"), filter = document.getElementById("config-filter");
  const changed = (key) => (SINGLE ? RUNS[0].changed.includes(key) : new Set(RUNS.map((run) => text(run.config[key]))).size > 1);
  const draw = () => {
    const wanted = filter.value.toLowerCase();
    const rows = keys.filter((key) => (all.checked || changed(key)) && [key, ...RUNS.map((run) => text(run.config[key]))].some((part) => part.toLowerCase().includes(wanted)));
    const head = SINGLE ? ["key", "value", "default"] : ["key", ...RUNS.map((run) => run.name)];
    const cells = (key) => (SINGLE ? [text(RUNS[0].config[key]), changed(key) ? text(DATA.defaults[key]) : ""] : RUNS.map((run) => text(run.config[key])));
    document.getElementById("config-table").replaceChildren(el("table", {},
      el("thead", {}, el("tr", {}, ...head.map((name) => el("th", {}, name)))),
      el("tbody", {}, ...(rows.length ? rows.map((key) => el("tr", {}, el("td", {}, key),
        ...cells(key).map((value, i) => el("td", { class: SINGLE && (i || !changed(key)) ? "default" : "" }, value))))
        : [el("tr", {}, el("td", {}, SINGLE || wanted ? "nothing to show" : "the configurations are equal"))]))));
  };
  all.addEventListener("change", draw);
  filter.addEventListener("input", draw);
  draw();
}

function useTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const set = (name) => { document.documentElement.dataset.theme = name; };
  set(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => set(dark.matches ? "dark" : "light"));
  return () => set(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
}

const turnTheme = useTheme();
drawOverview();
drawCurves();
drawConfig();
const samples = new Samples(RUNS, DATA.pictures);
Chart.onPick = (step) => samples.goTo(step);
const keys = document.getElementById("keys");
document.getElementById("keys-button").addEventListener("click", () => keys.showModal());
document.getElementById("theme").addEventListener("click", turnTheme);
const jump = (name) => document.getElementById(name).scrollIntoView();
const KEYS = {
  "[": () => samples.move(-1), "]": () => samples.move(1), j: () => samples.turn(1), k: () => samples.turn(-1),
  w: () => samples.set({ worst: !samples.worst, page: samples.page }), "/": () => document.getElementById("search").focus(),
  c: () => jump("curves"), s: () => jump("samples"), f: () => jump("config"), t: turnTheme, "?": () => keys.showModal(),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog") || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});
const step = /step=(\d+)/.exec(location.hash);
if (step) samples.goTo(+step[1]);
