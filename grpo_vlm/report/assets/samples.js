// The sample browser: groups of answers, filtered by run, step, split, score and text; best or worst first; in pages.

const PER_PAGE = 5;
const FULL = 1e-9;

// The best and the worst value of each reward part among all shown answers of a run: what "full marks" means there.
function ranges(groups) {
  const found = {};
  for (const group of groups) for (const answer of group.answers) for (const [part, value] of Object.entries(answer.scores)) {
    if (value == null) continue;
    const range = (found[part] ??= { low: value, high: value });
    range.low = Math.min(range.low, value);
    range.high = Math.max(range.high, value);
  }
  return found;
}

const overall = (answer) => answer.scores.overall ?? null;

// Of the scores of a group; 0 without any.
function mean(group) {
  const scores = group.answers.map(overall).filter((score) => score != null);
  return scores.reduce((sum, score) => sum + score, 0) / (scores.length || 1);
}

// full marks, part of them, the lowest score, or not scored
function tone(answer, range) {
  const score = overall(answer);
  if (score == null) return "none";
  if (score >= range.high - FULL && range.high > 0) return "good";
  return score <= Math.max(range.low, 0) + FULL ? "bad" : "mid";
}

const same = (one, other) => one.toLowerCase().replace(/\s+/g, "") === other.toLowerCase().replace(/\s+/g, "");

// Why an answer has less than full marks, from its parts, its reading and its end.
function reasons(answer, group, parts) {
  const told = [];
  if (overall(answer) == null) return ["The reward did not score it."];
  const lost = Object.entries(answer.scores).filter(([part, value]) => part !== "overall" && value != null && value < parts[part].high - FULL);
  if (lost.length) told.push(`Lost on ${lost.map(([part, value]) => `${part} (${show(value)}, best seen ${show(parts[part].high)})`).join(" and ")}.`);
  else if (Object.keys(answer.scores).length > 1) told.push("No other part was lost: the overall score asks for something more, such as the form.");
  if (!answer.read) told.push(`No final answer found: ${answer.unread}.`);
  else if (!same(answer.read, group.ground_truth)) told.push(`Final answer read as “${answer.read}”, ground truth “${group.ground_truth}”.`);
  else told.push("The final answer reads like the ground truth.");
  if (answer.finish_reason === "length") told.push(`Cut off after ${answer.response_length} tokens, the limit.`);
  return told;
}

// The text with the last place of the final answer marked.
function marked(text, read) {
  const at = read ? text.lastIndexOf(read) : -1;
  return at < 0 ? [text] : [text.slice(0, at), el("mark", {}, read), text.slice(at + read.length)];
}

class Samples {
  constructor(runs, pictures) {
    Object.assign(this, { runs, pictures, run: 0, step: "", split: "", tone: "", low: "", high: "", text: "", worst: true, page: 0 });
    this.parts = runs.map((run) => ranges(run.groups));
    this.run = Math.max(0, runs.findIndex((run) => run.groups.length));
    this.form = document.getElementById("filters");
    this.list = document.getElementById("groups");
    this.step = String(this.steps.at(-1) ?? "");
    this.build();
    this.draw();
  }

  get groups() { return this.runs[this.run].groups; }
  get steps() { return [...new Set(this.groups.map((group) => group.step))]; }

  build() {
    const pick = (name, label, options) => {
      const box = el("select", { name, "aria-label": label, onchange: () => this.set({ [name]: box.value }) },
        ...options.map(([value, text]) => el("option", { value }, text)));
      return box;
    };
    const type = (name, attributes) => {
      const box = el("input", { name, ...attributes, oninput: () => this.set({ [name]: box.value }) });
      return box;
    };
    this.stepBox = pick("step", "Step", []);
    this.runBox = pick("run", "Run", this.runs.map((run, i) => [i, run.name]));
    this.orderButton = el("button", { type: "button", id: "order", onclick: () => this.set({ worst: !this.worst }) });
    const step = (by, text, label) => el("button", { type: "button", "aria-label": label, title: label, onclick: () => this.move(by) }, text);
    this.form.replaceChildren(
      this.runs.length > 1 ? el("label", { class: "control" }, "Run", this.runBox) : "",
      el("span", { class: "control" }, "Step", el("span", { class: "join" }, step(-1, "‹", "Earlier step ([)"), this.stepBox, step(1, "›", "Later step (])"))),
      pick("split", "Split", [["", "both splits"], ["train", "training"], ["val", "held-out"]]),
      pick("tone", "Answers", [["", "all answers"], ["lost", "not full marks"], ["bad", "lowest score"], ["good", "full marks"], ["cut", "cut off"]]),
      el("span", { class: "control" }, "Score", type("low", { type: "number", step: "any", placeholder: "from", "aria-label": "Lowest score" }),
        type("high", { type: "number", step: "any", placeholder: "to", "aria-label": "Highest score" })),
      type("text", { type: "search", id: "search", placeholder: "search (/)", "aria-label": "Search in questions and answers" }),
      this.orderButton,
      (this.topPager = el("div", { class: "pager" })),
    );
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.fillSteps();
  }

  fillSteps() {
    this.stepBox.replaceChildren(el("option", { value: "" }, "all"), ...this.steps.map((step) => el("option", { value: step }, step === 0 ? "0 (before training)" : step)));
  }

  set(changes) {
    Object.assign(this, { page: 0 }, changes);
    if ("run" in changes) { this.run = +changes.run; this.fillSteps(); if (!this.steps.includes(+this.step)) this.step = ""; }
    this.draw();
  }

  // The next or previous step that has groups.
  move(by) {
    const all = ["", ...this.steps.map(String)], at = all.indexOf(String(this.step)) + by;
    if (at >= 0 && at < all.length) this.set({ step: all[at] });
  }

  turn(by) { this.page += by; this.draw(); }

  // Shows the step nearest to one that was clicked in a chart.
  goTo(step) {
    if (!this.groups.length) return;
    const steps = this.steps.map((one) => [one]);
    this.set({ step: String(steps[nearest(steps, step)][0]) });
    document.getElementById("samples").scrollIntoView();
  }

  fits(answer, group, range) {
    const score = overall(answer), kind = tone(answer, range), wanted = this.text.toLowerCase();
    if (this.tone === "lost" ? kind === "good" : this.tone === "cut" ? answer.finish_reason !== "length" : this.tone && kind !== this.tone) return false;
    if ((this.low !== "" && !(score >= +this.low)) || (this.high !== "" && !(score != null && score <= +this.high))) return false;
    return !wanted || [answer.response, group.ground_truth, group.row_id, ...group.question.map(([, text]) => text)].some((text) => text.toLowerCase().includes(wanted));
  }

  found() {
    const range = this.parts[this.run].overall ?? { low: 0, high: 0 };
    return this.groups
      .filter((group) => (this.step === "" || group.step === +this.step) && (!this.split || group.split === this.split))
      .map((group) => [group, group.answers.map((answer) => this.fits(answer, group, range))])
      .filter(([, fit]) => fit.some(Boolean))
      .sort(([one], [other]) => one.step - other.step || (this.worst ? 1 : -1) * (mean(one) - mean(other)));
  }

  draw() {
    const found = this.found(), pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
    this.page = Math.min(Math.max(0, this.page), pages - 1);
    this.stepBox.value = this.step;
    this.orderButton.textContent = `⇅ ${this.worst ? "worst" : "best"} first`;
    const shown = found.slice(this.page * PER_PAGE, (this.page + 1) * PER_PAGE);
    const [first, last] = this.steps.length ? [this.steps[0], this.steps.at(-1)] : [0, 0];
    const { left_out: without } = this.runs[this.run];
    const leftOut = without ? ` The groups of ${without} more steps are in groups.jsonl of the run folder.` : "";
    document.getElementById("samples-hint").textContent = this.groups.length
      ? `${found.length} of ${this.groups.length} groups of steps ${first} to ${last}. Of each step a few are kept: the lowest, the highest, the most divided, others drawn evenly.${this.stepReward()}${leftOut}`
      : "";
    this.list.replaceChildren(...(shown.length ? shown.map(([group, fit]) => this.card(group, fit))
      : [el("p", { class: "empty" }, this.groups.length ? "No answer fits these filters." : "This run has no samples yet.")]));
    this.pager(this.topPager, pages);
    this.pager(document.getElementById("pager-bottom"), pages);
  }

  // What all answers of the chosen step scored, kept or not.
  stepReward() {
    const point = (this.runs[this.run].points["reward/overall"] ?? []).find(([step]) => step === +this.step);
    return this.step !== "" && point ? ` All answers of step ${this.step} have a mean reward of ${show(point[1])}.` : "";
  }

  pager(node, pages) {
    node.replaceChildren(
      el("button", { type: "button", class: "previous", disabled: this.page === 0, onclick: () => this.turn(-1), title: "Previous page (k)" }, "Previous"),
      el("span", { class: "number" }, `page ${this.page + 1} of ${pages}`),
      el("button", { type: "button", class: "next", disabled: this.page >= pages - 1, onclick: () => this.turn(1), title: "Next page (j)" }, "Next"),
    );
  }

  card(group, fit) {
    const parts = this.parts[this.run], range = parts.overall ?? { low: 0, high: 0 };
    const order = group.answers.map((_, i) => i).sort((a, b) => (this.worst ? 1 : -1) * (group.answers[a].reward - group.answers[b].reward) || a - b);
    const scores = group.answers.map(overall).filter((score) => score != null);
    const full = group.answers.filter((answer) => tone(answer, range) === "good").length;
    const largest = Math.max(1e-9, ...group.answers.map((answer) => Math.abs(answer.advantage ?? 0)));
    const flat = group.split === "train" && scores.length > 1 && Math.max(...scores) === Math.min(...scores);
    return el("article", { class: "group", "data-step": group.step },
      el("div", { class: "asked" },
        group.pictures.length ? el("div", { class: "pictures" }, ...group.pictures.map((name, i) => this.picture(name, i))) : null,
        el("div", { class: "question" }, ...group.question.flatMap(([role, text]) => [el("span", { class: "role" }, role), `${text.replaceAll("[picture]", "").trim()}\n`])),
        el("div", { class: "truth" }, "Ground truth ", el("b", {}, group.ground_truth || "(none)")),
        el("div", { class: "meta" }, [group.step === 0 ? "before training" : `step ${group.step}`, group.split === "val" ? "held-out" : "training", group.row_id, group.why].filter(Boolean).join(" · "))),
      el("div", { class: "answers" },
        el("div", { class: "verdict" }, el("span", {}, el("b", {}, `${full} of ${group.answers.length}`), " with full marks"),
          el("span", {}, "mean score ", el("b", {}, show(scores.length ? mean(group) : null))),
          flat ? el("span", {}, "all scores equal: the group teaches nothing") : null),
        el("div", { class: "columns" }, ...order.map((i) => this.answer(group.answers[i], group, fit[i], largest)))));
  }

  picture(name, i) {
    const source = this.pictures[name];
    if (!source) return el("span", { class: "meta" }, "picture left out for size");
    const image = el("img", { src: source, alt: `picture ${i + 1}`, onload: () => image.classList.toggle("tiny", image.naturalWidth < 150) });
    return el("button", { type: "button", title: "Enlarge", onclick: () => {
      const box = document.getElementById("zoom");
      box.querySelector("img").src = source;
      box.showModal();
    } }, image);
  }

  answer(answer, group, fits, largest) {
    const parts = this.parts[this.run], range = parts.overall ?? { low: 0, high: 0 }, kind = tone(answer, range);
    const chips = Object.entries(answer.scores).filter(([part]) => part !== "overall").map(([part, value]) => {
      const span = parts[part], told = span && span.high > span.low;
      return el("span", { class: `chip ${told ? (value >= span.high - FULL ? "full" : "lost") : ""}` }, `${part} `, el("b", {}, show(value)));
    });
    const response = el("div", { class: "response" }, ...marked(answer.response, answer.read));
    const long = answer.response.length > 900 || answer.response.split("\n").length > 9;
    if (long) response.classList.add("cut");
    const more = long ? el("button", { type: "button", class: "more", onclick: () => {
      more.textContent = response.classList.toggle("open") ? "show less" : "show all";
    } }, "show all") : null;
    return el("div", { class: `answer ${kind} ${fits ? "" : "outside"}` },
      el("div", { class: "line" },
        el("span", { class: "pill", title: "overall score" }, show(overall(answer))), ...chips,
        Math.abs(answer.reward - (overall(answer) ?? answer.reward)) > 1e-6 ? el("span", { class: "chip", title: "score less the KL penalty" }, "reward ", el("b", {}, show(answer.reward))) : null,
        answer.advantage != null ? this.advantage(answer.advantage, largest) : null,
        answer.finish_reason === "length" ? el("span", { class: "chip warn" }, "cut off") : null,
        answer.counted ? null : el("span", { class: "chip warn" }, "left out of the loss"),
        el("span", { class: "tail" }, `${answer.response_length} tokens`)),
      kind === "good" ? null : el("p", { class: "why" }, el("b", {}, kind === "bad" ? "Why: " : kind === "none" ? "" : "Why not full: "), reasons(answer, group, parts).join(" ")),
      response, more);
  }

  // A bar left of the middle for a negative advantage, right of it for a positive one.
  advantage(value, largest) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "-28 0 56 8");
    svg.setAttribute("aria-hidden", "true");
    const length = (Math.abs(value) / largest) * 27;
    draw("rect", { x: -28, y: 3, width: 56, height: 2, fill: "var(--raised)" }, svg);
    draw("rect", { x: value < 0 ? -length : 0, y: 1, width: length, height: 6, rx: 1, fill: value < 0 ? "var(--bad)" : "var(--good)" }, svg);
    return el("span", { class: "advantage", title: "advantage: how far above or below its group the answer is" }, svg, `advantage ${value > 0 ? "+" : ""}${value.toFixed(2)}`);
  }
}
