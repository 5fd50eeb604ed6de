"""What the grader holds for right and wrong: reported trouble pairs, and every policy that grade.py states."""

import json
from pathlib import Path

import pytest

from grpo_vlm.errors import RewardError
from grpo_vlm.rewards.grade import grade

FILE = Path(__file__).parents[1] / "data" / "grader_pairs.jsonl"
PAIRS = [json.loads(line) for line in FILE.open(encoding="utf-8")]
# The pairs whose verdict is ours to choose: the choice, as grade.py's docstring states it.
CHOSEN = {
    "P15": False,  # a condition beside a relation makes it another one
    "P24": True,  # an interval may be written as an inequality
    "P33": True,  # 28% is 28 ...
    "P34": True,
    "P77": True,  # ... and 0.28
    "P78": True,
    "P35": False,  # without a sign nothing is scaled
    "P43": True,  # an exact answer that rounds to a decimal gold of three digits or more
    "P47": False,  # a list of remarks is no final answer
    "P55": True,  # a decimal comma where the gold has a decimal point
    "P80": True,  # a fraction need not be reduced
    "P85": True,  # an unbracketed list has no order
}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["id"])
def test_reported_pairs(pair):
    right = CHOSEN[pair["id"]] if pair["policy"] else pair["right"]
    verdict = grade(pair["pred"], pair["gold"])
    assert verdict.correct is right, verdict
    assert pair["right"] in (None, right)


def test_every_pair_of_the_reports_is_there():
    assert sum(not pair["policy"] for pair in PAIRS) == 53
    assert CHOSEN.keys() == {pair["id"] for pair in PAIRS if pair["policy"]}


# policy -> (gold, prediction, right)
POLICIES = {
    "where the answer is": [
        ("3", "\\boxed{2} and then \\boxed{3}", True),
        ("2", "\\boxed{2} and then \\boxed{3}", False),
        ("3", "\\boxed{3} and then \\boxed{2", True),
        ("4", "\\boxed{4", False),
        ("4", "\\boxed{}", False),
        ("4", "\\boxed{4} so \\boxed{}", False),
        ("4", "<think>\\boxed{4}</think>", False),
        ("4", "<think>\\boxed{4}", False),
        ("4", "<think>\\boxed{5}</think> \\boxed{4}", True),
        ("4", "prefilled: \\boxed{5} < / think > \\boxed{4}", True),
        ("4", "<answer>\\boxed{4}</answer>", True),
        ("4", "<think>a</think><answer>\nThe answer is \\boxed{4}.\n</answer>", True),
        ("4", "<answer>5</answer> or <answer>4</answer>", True),
        ("4", "<think>a</think><answer>4", True),
        ("4", "<answer></answer>", False),
        ("\\frac{a}{b}", "\\boxed{\\text{so }\\frac{a}{b}}", False),
        ("34", "**Final Answer**\n\n34", True),
        ("34", "**Final Answer:** $\\boxed{34}$", True),
        ("34", "The final answer is $\\boxed{34}$. I hope it is correct.", True),
        ("34", "\\boxed{34}\nThe answer is in centimetres.", True),
        ("34", "\\boxed{43}\nAnswer: 34", True),
        ("18", "Some reasoning\n#### 18", True),
        ("18", "所以答案是18", True),
        ("x=5", "Answer:\n\\[\nx = 5\n\\]", True),
        ("42", "We compute.\n\n42", True),
        ("42", "Let me see. $6 \\cdot 7 = 42$", True),
        ("5", "Therefore, $x = 5$.", True),
        ("5", "The answer is 5 because 2+3=5.", True),
        ("5", "The answer is 5, not 6", True),
        ("2", "two of the 12 boxes hold 2.5", False),
        ("5", "<answer>There are 5 cubes.</answer>", True),
        ("5", "There are 5 red cubes and 3 blue ones.", False),
        ("5", "Total: 5", True),
        ("5", "\\boxed{{5}}}", True),
        ("5", "\\boxed{\\boxed{5}}", True),
        ("5", "答案：５", True),
    ],
    "an answer that is cut off, coloured or between tokens": [
        ("4", "<answer>5</answer><answer>4", True),
        ("4", "<answer>4</answ", True),
        ("4", "<answer>4<answer>", True),
        ("4", "<answer>4</answer><answer>", False),
        ("4", "<answer>\\boxed{4</answer>", False),
        ("5", "\\boxed{5\\ }", True),
        ("5", "\\boxed{5\\\\}", True),
        ("5", "\\textcolor{red}{5}", True),
        ("5", "\\boxed{\\color{red}{\\large 5}}", True),
        ("-5", "\\textcolor{red}{5}", False),
        ("25", "\\textcolor{red}{2}\\textcolor{blue}{5}", True),
        ("10", "\\textcolor{red}{2}\\textcolor{blue}{5}", False),
        ("red", "\\textcolor{red}{blue}", False),
        ("5", "5\\phantom{6}", True),
        ("56", "5\\phantom{6}", False),
        ("5", "<think>a</think><|begin_of_box|>5<|end_of_box|><|user|>", True),
        ("5", "<|begin_of_box|>6<|end_of_box|>", False),
        ("5", "The answer is 5<|im_end|>", True),
        ("5", "5 is the answer.", True),
        ("5", "5 is not the answer.", False),
        ("4", "| step | value |\n|---|---|\n| total | 4 |\n\nThe answer is 5.", False),
    ],
    "a unit outside the box": [
        ("5 m", "\\boxed{5} cm", False),
        ("5 cm", "\\boxed{5} cm", True),
        ("5", "\\boxed{5} cm", True),
        ("50 mm", "The length is $\\boxed{5}\\,\\text{cm}$.", True),
        ("5 m", "\\(\\boxed{5}\\) cm, as the sketch shows", False),
        ("5 m", "$\\boxed{5}\\text{ m}^2$", False),
        ("60 km/h", "\\boxed{60} miles per hour", False),
        ("0.25", "\\boxed{25}\\%", True),
        ("30", "$\\boxed{30}^\\circ$", True),
        ("5 cents", "$\\$\\boxed{5}$", False),
        ("5 m", "\\boxed{5} in the box, in total", True),
        ("5 m", "\\boxed{5}. A cm is less", True),
        ("5 m", "\\boxed{5\\text{ m}} cm", True),
    ],
    "hedging": [
        ("5", "$\\boxed{6}$ or $\\boxed{5}$", False),
        ("5", "\\boxed{6}, no, \\boxed{5}", True),
        ("5", "the answer is 5 or 6", False),
        ("5", "either 5 or 6", False),
        ("5", "Answer: 5. Or maybe 6.", False),
        ("5", "\\boxed{5, 6}", False),
        ("5", "\\boxed{5 \\text{ or } 6}", False),
        ("red", "red or blue", False),
        ("yes", "yes or no", False),
        ("yes", "yes and no", False),
    ],
    "numbers": [
        ("1/2", "0.5", True),
        ("1/3", "0.33", False),
        ("0.33", "1/3", False),
        ("\\pi", "22/7", False),
        ("12", "12!", False),
        ("12", "at least 12", False),
        ("12", "about 12", True),
        ("3", "3 of 4", False),
        ("7.071067811865475", "5\\sqrt2", True),
        ("1/3", "0.3333333333", True),
        ("1/3", "0.\\overline{3}", True),
        ("1/6", "0.1666...", True),
        ("1/3", "0.3...", False),
        ("1234567890.12", "1234567890.13", False),
        ("10", "10.00000001", False),
        ("1", "0.999", False),
        ("13\\pi", "40.84", False),
        ("40.84", "13\\pi", True),
        ("40.84", "40.841", False),
        ("\\frac12", "\\tfrac{1}{2}", True),
        ("2\\sqrt3", "sqrt(12)", True),
        ("2√3", "\\sqrt{12}", True),
        ("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt 2}", True),
        ("\\frac{\\sqrt{2}}{2}", "0.707", False),
        ("-5", "−5", True),
        ("2π", "2\\pi", True),
        ("1000", "1e3", True),
        ("0.001", "10^{-3}", True),
        ("1024", "2^10", True),
        ("8", "2**3", True),
        ("23", "2**3", False),
        ("8", "**8**", True),
        ("8", "*8*", True),
        ("8", "`8`", True),
        ("24", "2*3*4", True),
        ("10!", "3628800", True),
        ("10", "\\binom{5}{2}", True),
        ("\\sin 30^\\circ", "0.5", True),
        ("\\sqrt[3]{-8}", "-2", True),
        ("101_2", "5", False),
        ("-\\infty", "-infinity", True),
        ("6.02 \\times 10^{23}", "6.02x10^23", True),
        ("\\frac{a}{b}", "{b \\over a}", False),
    ],
    "numbers in words": [
        ("5", "five", True),
        ("21", "twenty-one", True),
        ("10", "a ten", True),
        ("10", "a tenth", False),
        ("0.1", "a tenth", True),
        ("125", "one hundred and twenty-five", True),
        ("105", "one hundred fifty", False),
        ("2,300", "two thousand three hundred", True),
        ("5 million", "5,000,000", True),
        ("5", "five million", False),
        ("2.5 hours", "two and a half hours", True),
        ("2", "two and a half", False),
        ("2/3", "two-thirds", True),
        ("3", "the third", False),
        ("1/3", "the third", False),
        ("-5", "minus five", True),
        ("5", "five or six", False),
        ("5, 6", "five and six", True),
        ("25", "twenty and five", False),
        ("24", "two dozen", True),
        ("4", "four-sided", False),
        ("200 m", "two hundred cm", False),
        ("1", "no one", False),
    ],
    "dates and telephone numbers": [
        ("2018", "2024-01-05", False),
        ("2024-01-05", "2018", False),
        ("2024-01-05", "2022-01-03", False),
        ("2024-01-05", "2024/1/5", True),
        ("01/05/2024", "05/01/2024", False),
        ("2023", "2024-01", False),
        ("-679", "555-1234", False),
        ("55", "180-90-35", True),
        ("1985", "x = 2000-10-5 = 1985", True),
    ],
    "percent": [("\\frac14", "25\\%", True), ("25%", "25 percent", True), ("28", "0.28", False), ("50%", "5%", False)],
    "units": [
        ("5 cm", "5 m", False),
        ("5 cm", "50 mm", True),
        ("5 cm", "5", True),
        ("5", "5cm", True),
        ("5 cm", "5 cm^2", False),
        ("12", "12 square units", True),
        ("12 \\text{ hours}", "720 minutes", True),
        ("60 km/h", "60 miles per hour", False),
        ("\\$0.50", "50 cents", True),
        ("5 apples", "five apples", True),
        ("5 apples", "5 pears", False),
        ("5", "5 hundred", False),
        ("5", "5m", False),
        ("46", "m∠A = 46°", True),
        ("180^\\circ - 40^\\circ", "140", True),
        ("37°C", "37°F", False),
        ("37 °C", "37 degrees Celsius", True),
        ("5 mm", "5 Mm", False),
        ("5 mm", "5 MM", False),
        ("5 mW", "5 MW", False),
        ("5 MHz", "5 mHz", False),
        ("5 km", "5 Km", True),
        ("3 Apples", "3 apples", True),
        ("5 kN", "5000 N", True),
        ("0.005 mm", "5 µm", True),
        ("2 MN", "2", False),
        ("5nm", "5mn", True),
        ("5 m/s", "five metres per second", True),
        ("5 m/s", "five metres per minute", False),
        ("9.8 m/s^2", "9.8 meters per second per second", True),
        ("60 mph", "60 miles per hour", True),
        ("1 L", "1000 cm^3", True),
        ("1 L", "1000 cm^2", False),
        ("10 m/s", "10 \\frac{\\text{m}}{\\text{s}}", True),
        ("10 m/s", "10 \\frac{\\text{m}}{\\text{min}}", False),
        ("5%", "5 per cent", True),
    ],
    "mixed numbers": [
        ("48/11", "4\\frac{4}{11}", True),
        ("-40/9", "-4 4/9", True),
        ("44/9", "4 4/9", False),
        ("2x", "2\\frac{x}{1}", True),
    ],
    "thousands": [
        ("1000", "1,000", True),
        ("1234567", "1 234 567", True),
        ("14916", "14{,}916", True),
        ("1.234", "1,234", False),
        ("(1,000)", "1000", False),
        ("1.5", "1,5", True),
        ("1/2", "0,5", False),
        ("1,2", "1.2", False),
        ("1.2", "1, 2", False),
        ("(1,2)", "1.2", False),
    ],
    "lists, sets, tuples and intervals": [
        ("(1,2)", "(2,1)", False),
        ("\\{1,2\\}", "\\{2,1\\}", True),
        ("\\{1,2\\}", "\\{1,2,2\\}", True),
        ("1, 2, 2", "1, 2", False),
        ("1,2", "2 and 1", True),
        ("(1,2)", "(x,y)=(1,2)", True),
        ("(1,2)", "(x,y)=(2,1)", False),
        ("(1,2)", "(y,x)=(1,2)", False),
        ("(x,y)=(1,2)", "(1,2)", True),
        ("(x,y)=(1,2)", "(a,b)=(1,2)", False),
        ("[1,2]", "(x,y)=(1,2)", False),
        ("x=1, y=2", "1, 2", True),
        ("x=1, y=2", "2, 1", False),
        ("x_1=1, x_2=2", "2, 1", True),
        ("\\emptyset", "no solution", True),
        ("no solution", "\\boxed{\\varnothing}", True),
        ("\\emptyset", "The equation has no real solutions.", True),
        ("\\emptyset", "\\{\\}", True),
        ("\\emptyset", "\\boxed{}", False),
        ("\\emptyset", "\\{0\\}", False),
        ("0", "no solution", False),
        ("no solution", "one solution", False),
        ("no solution", "no solution other than 3", False),
        ("(-\\infty,\\infty)", "all real numbers", True),
        ("R", "\\mathbb{R}", False),
        ("[1,2)", "(1,2)", False),
        ("(3,-4)", "3, -4", False),
        ("3, -3", "\\pm 3", True),
        ("x=\\pm 3", "x = 3 or x = -3", True),
        ("2 \\pm \\sqrt{3}", "2+\\sqrt3, 2-\\sqrt3", True),
        ("x \\ge 3", "[3,\\infty)", True),
        ("x \\ge 3", "(3,\\infty)", False),
        ("(-\\infty,1)\\cup(2,3]", "(2,3]\\cup(-\\infty,1)", True),
        ("(-\\infty,1)\\cup(2,3]", "(-\\infty,1)", False),
    ],
    "equations": [
        ("3", "x=3", True),
        ("x=3", "3", True),
        ("y=3", "x=3", False),
        ("a + b = 90", "b = 90 - a", True),
        ("a + b = 90", "a + b > 90", False),
        ("90 > a + b", "a + b < 90", True),
        ("x^2+y^2=4", "y^2 = 4 - x^2", True),
        ("x^2+y^2=4", "x^2+y^2=2", False),
        ("13", "x = 26/2 = 13", True),
        ("5", "AB = CD = 5", True),
        ("12", "x \\leq 12", False),
        ("-2<x<3", "-2<y<3", False),
        ("5", "2+2=5", False),
        ("9\\pi", "A = \\pi r^2 = \\pi \\cdot 3^2 = 9\\pi", True),
        ("9\\pi", "x = \\ldots = 9\\pi", True),
        ("9\\pi", "A = \\pi r^2 = \\pi 2^2 = 9\\pi", False),
        ("3", "x = 2y = 6", False),
        ("y=3", "x = 2y = 6", False),
        ("\\pi r^2", "A = \\pi r^2 = 9\\pi", False),
        ("9\\pi", "A = \\pi r^2 \\approx 28.27", False),
        ("13\\pi", "13\\pi \\approx 40.84", True),
        ("13\\pi", "13\\pi \\approx 41.84", False),
        ("\\angle 8 \\cong \\angle 2", "∠2 ≅ ∠8", True),
        ("\\angle 8 \\cong \\angle 2", "∠8 ≅ ∠3", False),
    ],
    "ratios": [
        ("2:3", "4:6", True),
        ("2:3", "\\frac{2}{3}", True),
        ("2:3", "3:2", False),
        ("12:00", "1:00", False),
        ("3:00 am", "3:00 pm", False),
        ("3:00 PM", "3:00 p.m.", True),
        ("5:30", "5:03", False),
    ],
    "formulas": [
        ("x^2+2x+1", "(x+1)^2", True),
        ("x^2+2x+1", "(x-1)^2", False),
        ("\\sqrt{xy}", "\\sqrt{x}\\sqrt{y}", True),
        ("\\sqrt{x^2}", "x", False),
        ("\\sin(2x)", "2\\sin x\\cos x", True),
        ("360 - (m - n)", "m - n + 360", False),
        ("3+2i", "2i+3", True),
        ("(1+i)^2", "2i", True),
        ("\\log 100", "2", True),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix} \\frac22 & 2 \\\\ 3 & 4 \\end{bmatrix}", True),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 5 \\end{pmatrix}", False),
    ],
    "words": [
        ("red", "The answer is Red.", True),
        ("red", "the red", True),
        ("red", "not red", False),
        ("U.S.", "the US", True),
        ("top left", "Top-Left", True),
        ("red", "red circle", False),
        ("yes", "Yes, because the lines are parallel.", True),
        ("yes", "No.", False),
        ("no", "No (the lines cross).", True),
        ("no", "no they do not", True),
        ("yes", "Yes. The lines are parallel.", True),
        ("yes", "Yes. No.", False),
        ("yes", "Yes, but I am not sure", False),
        *(
            ("no", text, False)
            for text in ("no idea", "No answer.", "no. 5", "No 5", "no solution", "no one", "No parking")
        ),
        ("true", "true love", False),
        ("false", "false alarm", False),
        ("no parking", "no parking", True),
        ("A D and B E", "BE and AD", True),
        ("A D and B E", "AD and BC", False),
        ("AB", "BA", False),
        ("not enough information", "The answer is not enough information.", True),
        ("None", "None", True),
        ("9. Anya needs to climb a ladder", "9", False),
    ],
    "letters without choices": [
        ("C", "\\text{(C)}", True),
        ("C", "c", True),
        ("C", "Option C", True),
        ("C", "The correct answer is (C) 45 degrees", True),
        ("C", "<answer>C: triangle</answer>", True),
        ("C", "\\boxed{C\\text{. }12\\text{ cm}}", True),
        ("(C)", "C", True),
        ("A", "not A", False),
        ("A", "The answer is not A", False),
        ("A", "A car is moving", False),
        ("A", "It is A. It is B. It is C.", False),
        ("B", "The answer is B and C", False),
        ("B", "ABCD", False),
        ("A", "A is incorrect.", False),
        ("B", "option B is right", True),
        ("B", "B – triangle", True),
        ("B", "neither A nor B", False),
        ("B", "B/C", False),
        ("A", "(A) or (B)", False),
        ("B", "I think A. But no, the answer is B", True),
    ],
    "empty": [("", "", False), ("4", "", False), ("4", " \n", False), (" ", "4", False), ("4", "\\boxed{ }", False)],
}


@pytest.mark.parametrize(
    ("gold", "prediction", "right"),
    [
        pytest.param(*pair, id=f"{policy}: {pair[0]} | {pair[1]}")
        for policy, pairs in POLICIES.items()
        for pair in pairs
    ],
)
def test_policies(gold, prediction, right):
    verdict = grade(prediction, gold)
    assert verdict.correct is right, verdict


CHOICES = ["10 cm", "12 cm", "13 cm", "\\frac{1}{2}"]


@pytest.mark.parametrize(
    ("gold", "prediction", "right"),
    [
        ("B", "B", True),
        ("B", "b", True),
        ("B", "B. 12 cm", True),
        ("B", "(B)", True),
        ("B", "12 cm", True),
        ("B", "12", True),
        ("B", "120 mm", True),
        ("12 cm", "The correct option is B.", True),
        ("12", "B) 12 cm", True),
        ("D", "0.5", True),
        ("B", "12 m", False),
        ("B", "B. 13 cm", False),
        ("B", "A or B", False),
        ("B", "A, B", False),
        ("B", "C", False),
        ("B", "E", False),
        ("B", "12 cm or 13 cm", False),
        ("B", "not B", False),
        ("B", "", False),
        ("7 cm", "7 cm", True),
    ],
)
def test_letters_and_texts_of_choices(gold, prediction, right):
    verdict = grade(prediction, gold, choices=CHOICES)
    assert verdict.correct is right, verdict


def test_tolerance_is_absolute_and_for_every_number():
    assert grade("3.14", "\\pi", tolerance=0.005)
    assert not grade("3.13", "\\pi", tolerance=0.005)
    assert grade("1000.004", "1000", tolerance=0.005)
    assert not grade("1000.006", "1000", tolerance=0.005)
    assert grade("0.13", "1/8", tolerance=0.005)  # the very border
    assert grade("(0.33, 0.67)", "(1/3, 2/3)", tolerance=0.005)
    assert not grade("(0.33, 0.68)", "(1/3, 2/3)", tolerance=0.005)


def test_a_verdict_says_what_was_graded_and_why():
    verdict = grade("so \\boxed{ 3 }", "4")
    assert (verdict.correct, verdict.extracted) == (False, "3")
    assert "'4'" in verdict.reason
    assert grade("<think>never ends", "4").extracted is None
    assert "does not end" in grade("<think>never ends", "4").reason
    assert "no short answer" in grade("4", "Let us see. The cat sat down. Then it left the room.").reason


def test_wrong_arguments_are_named_all_at_once():
    with pytest.raises(RewardError, match=r"gold must be a string, it is int '4'; choices must .*; tolerance must"):
        grade("4", 4, choices="ABCD", tolerance=-1)
    with pytest.raises(RewardError, match="choices must be 1 to 26 options, there are 0"):
        grade("4", "4", choices=[])


@pytest.mark.parametrize(
    ("prediction", "gold", "right"),
    [
        ("act", "cat", False),  # words, no products of c, a and t
        ("saw", "was", False),
        ("a cat", "cat", True),
        ("cat", "the cat", True),
        ("The answer is a car", "car", True),
        ("five", "5", True),
        ("yx", "xy", True),
        ("The answer can't be B", "B", False),
        ("It cannot be 5", "5", False),
        ("The area is 5", "5", True),
        ("B (but could be C)", "B", False),
        ("B. C", "B", False),
        ("A) 1 B) 2", "A", False),
        ("(A)(B)", "A", False),
        ("B: false", "B", False),
        ("B because A is wrong", "B", True),
        ("C. angle (A)", "C", True),
        ("option B: the point D", "B", True),
        ("€5", "$5", False),
        ("5 dollars", "$5", True),
        ("$5", "5", True),
    ],
)
def test_words_and_negations(prediction, gold, right):
    assert grade(prediction, gold).correct is right
