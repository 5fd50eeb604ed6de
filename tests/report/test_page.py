"""report.html: opened in a real browser (Debian's chromium) and used as a person would; what finds room; how it is
rewritten while a run goes on."""

import importlib.util
import json
import shutil
import time

import pytest

from grpo_vlm.cli import main as grpo_vlm
from grpo_vlm.report import RunFolder, page
from grpo_vlm.report.groups import GROUPS_NAME, Answer, ShownGroup, is_shown, pick, shorten, widest
from grpo_vlm.report.page import write_report
from grpo_vlm.report.trackers import ReportTracker
from tests.report.runs import HOSTILE, groups_of, make_run, record

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs a browser: apt-get install chromium, pip install playwright",
)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = make_run(tmp_path_factory.mktemp("runs") / "first")
    write_report([path])
    return path


@pytest.fixture
def opened(browser, run):
    """A function that opens a file at a width and fails the test on any message in the console."""
    faults = []

    def visit(path=run / "report.html", width=1400, scheme="light"):
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        tab.on("console", lambda message: faults.append(message.text))
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("request", lambda request: faults.append(request.url) if request.url.startswith("http") else None)
        tab.goto(path.as_uri())
        return tab

    yield visit
    for context in browser.contexts:
        context.close()
    assert faults == []


def count(tab, selector: str) -> int:
    return tab.locator(selector).count()


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (420, "dark")])
def test_curves_and_pictures_are_seen(opened, width, scheme):
    tab = opened(width=width, scheme=scheme)
    drawn = tab.eval_on_selector_all(
        "#charts .chart svg", "all => all.map(svg => svg.querySelectorAll('path').length)"
    )
    assert len(drawn) >= 15 and min(drawn) >= 1
    titles = tab.locator("#charts h4").all_inner_texts()
    for title in ("Reward parts", "KL to the reference", "Entropy", "Response length", "Clip fractions", "Memory"):
        assert title in titles
    tab.wait_for_function(
        "[...document.querySelectorAll('.pictures img')].every(i => i.complete && i.naturalWidth > 99)"
    )
    assert count(tab, ".pictures img") >= 5
    assert tab.evaluate("document.documentElement.scrollWidth") == width, "the page scrolls sideways"
    assert tab.evaluate("document.documentElement.dataset.theme") == scheme
    tab.keyboard.press("t")
    assert tab.evaluate("document.documentElement.dataset.theme") != scheme


@needs_browser
def test_it_tells_which_answers_were_wrong_at_step_10_and_why(opened):
    tab = opened()
    tab.select_option("select[name=step]", "10")
    tab.select_option("select[name=tone]", "lost")
    groups = groups_of(10)
    lost = [[a for a in group.answers if a.scores["overall"] < 1] for group in groups]
    assert tab.locator("#samples-hint").inner_text().startswith(f"{sum(map(bool, lost))} of 72 groups")
    seen = []
    while True:
        assert set(tab.eval_on_selector_all("article", "all => all.map(a => a.dataset.step)")) == {"10"}
        seen += tab.locator(".answer:not(.good):not(.outside)").all_inner_texts()
        if tab.locator(".next").first.is_disabled():
            break
        tab.keyboard.press("j")
    assert len(seen) == sum(map(len, lost)) > 5
    said = "\n".join(seen)
    assert "accuracy (0, best seen 1)" in said and "Cut off after" in said
    wrong = next(a for group in groups for a in group.answers if a.read and a.scores["accuracy"] == 0)
    truth = next(group.ground_truth for group in groups if wrong in group.answers)
    assert f"Final answer read as “{wrong.read}”, ground truth “{truth}”." in said
    assert HOSTILE.replace("\u2028", "").split()[0] in said  # shown as text
    assert tab.title() == "first"


@needs_browser
def test_samples_are_filtered_ordered_and_paged(opened):
    tab = opened()
    assert tab.input_value("select[name=step]") == "12"  # the last
    tab.keyboard.press("[")
    assert tab.input_value("select[name=step]") == "11"
    tab.select_option("select[name=step]", "")
    first_page = tab.locator("article").first.inner_text()
    assert "page 1 of 15" in tab.locator(".pager").first.inner_text()
    tab.locator(".next").first.click()
    assert "page 2 of 15" in tab.locator(".pager").first.inner_text()
    assert tab.locator("article").first.inner_text() != first_page
    tab.fill("input[name=low]", "0.9")
    scores = tab.locator(".answer:not(.outside) .pill").all_inner_texts()
    assert scores and all(float(score) >= 0.9 for score in scores)
    tab.fill("input[name=low]", "")
    for worst in (True, False):
        scores = [float(text) for text in tab.locator("article").nth(1).locator(".pill").all_inner_texts()]
        assert scores == sorted(scores, reverse=not worst)
        tab.locator("#order").click()
    tab.keyboard.press("Escape")
    tab.keyboard.press("/")
    tab.keyboard.type("no such words")
    assert tab.locator(".empty").inner_text() == "No answer fits these filters."


@needs_browser
def test_a_chart_leads_to_its_step(opened):
    tab = opened()
    chart = tab.locator("#charts svg").first
    chart.focus()
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#charts .at").nth(3).inner_text() == "step 2"  # the cursor runs through all charts
    tab.keyboard.press("Enter")
    assert tab.input_value("select[name=step]") == "2"
    tab.locator("#everything summary").click()
    assert count(tab, "#other-charts .chart") >= 1


@needs_browser
def test_runs_are_compared(opened, run, tmp_path):
    other = make_run(tmp_path / "second", 6, overrides=("algorithm.adv_estimator=rloo", "worker.rollout.n=4"))
    out = tmp_path / "both.html"
    assert grpo_vlm(["report", str(run), str(other), "--out", str(out)]) == 0
    tab = opened(out)
    keys = tab.locator("#config-table td:first-child").all_inner_texts()
    assert set(keys) == {"algorithm.adv_estimator", "trainer.max_steps", "worker.rollout.n"}
    legend = tab.locator("#charts .legend").first.inner_text()
    assert "first: training" in legend and "second: training" in legend
    tab.select_option("select[name=run]", "1")
    assert "steps 1 to 6" in tab.locator("#samples-hint").inner_text()
    tab.locator("#config-all").check()
    assert count(tab, "#config-table tbody tr") > 50


def test_a_run_without_samples_or_steps_has_a_page_too(tmp_path):
    for steps in (0, 2):
        text = write_report([make_run(tmp_path / str(steps), steps, groups=False)]).read_text()
        assert json.loads(text.split('id="data">')[1].split("</script>")[0])["runs"][0]["steps"] == [1, 2][:steps]


def test_what_is_no_run_is_named(tmp_path, capsys):
    assert grpo_vlm(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    told = capsys.readouterr().err
    assert "no run folder" in told and str(tmp_path / "a") in told and str(tmp_path / "b") in told


def test_first_last_and_round_steps_find_room_first(run, monkeypatch):
    monkeypatch.setattr(page, "SAMPLE_BYTES", (run / "report.html").stat().st_size // 2)
    text = page.render([run])
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])["runs"][0]
    steps = sorted({group["step"] for group in data["groups"]})
    assert {1, 10, 12} <= set(steps) and len(steps) < 10 and data["left_out"] == 12 - len(steps)


def test_a_run_rewrites_its_page_without_waiting(tmp_path):
    folder = RunFolder.open(tmp_path / "run", resume_step=None, config_yaml="trainer: {max_steps: 3}\n")
    tracker = ReportTracker(folder, pause_s=3600)
    waited = 0.0
    for step in range(1, 4):
        folder.append(record(step, groups=step < 3))
        began = time.monotonic()
        tracker.log(record(step, groups=False))
        waited = max(waited, time.monotonic() - began)
        if step == 1:
            tracker._thread.join()
            first = (folder.path / "report.html").read_text()
    assert waited < 0.1 and '"steps":[1]' in first
    assert '"steps":[1]' in (folder.path / "report.html").read_text()  # not due yet
    tracker.close()
    tracker.close()
    assert '"steps":[1,2,3]' in (folder.path / "report.html").read_text()
    folder.close()


def test_resuming_takes_back_the_groups_of_later_steps(tmp_path):
    path = make_run(tmp_path / "run", 4)
    (path / "global_step_2").mkdir()
    folder = RunFolder.open(path, resume_step=2, config_yaml="a: 1\n")
    assert folder.superseded[GROUPS_NAME] == 12
    steps = [json.loads(line)["step"] for line in (path / GROUPS_NAME).open(newline="\n")]
    assert steps == [1] * 6 + [2] * 6
    folder.close()


@pytest.mark.parametrize("total", [10, 400, 100_000])
def test_long_runs_keep_the_groups_of_some_steps(total):
    shown = [step for step in range(total + 1) if is_shown(step, total)]
    assert set(range(11)) <= set(shown) and total in shown and len(shown) <= 412


def test_the_groups_that_tell_most_are_picked():
    scores = [[1, 1], [0, 0], [0, 1], [0.5, 0.5], [], [0.4, 0.6], [0.2, 0.3], [0.6, 0.7]]
    reasons = pick(scores, 4)
    assert {reasons[1], reasons[0], reasons[2]} == {
        "lowest mean reward of the step",
        "highest mean reward of the step",
        "widest spread of the step",
    }
    assert len(reasons) == 4 and 4 not in reasons
    assert list(pick(scores[:2], 4)) == [0, 1] and list(pick([[], []], 4)) == [0, 1]


def test_large_groups_and_long_texts_are_bounded():
    answers = [Answer(str(place), "", "", {}, reward, None, 1, "stop") for place, reward in enumerate([3, 1, 2, 5, 4])]
    assert [answer.reward for answer in widest(answers, 4)] == [1, 2, 5, 4]
    text = shorten("a" * 50_000 + "the end")
    assert len(text) < 6100 and text.endswith("the end") and "44007 characters left out" in text
    row = json.loads(ShownGroup(1, "train", "r:0", "", (("user", "q"),), "x", tuple(answers)).to_json())
    assert row["question"] == [["user", "q"]] and row["answers"][3]["reward"] == 5
