"""Reward for grounding: how well the boxes in the answer cover those of the row. Edit freely.

overall = 0.9 * iou + 0.1 * format. The answer, in <answer> tags, a ```json block or alone, and the gold are JSON:
a box [x1, y1, x2, y2], a list of boxes, or {"bbox_2d": box} and lists of these. Boxes are paired, best IoU first; iou
is the sum over the pairs divided by the larger number of boxes, so that missing and superfluous ones cost. A wrong box
(not four numbers, corners swapped) or wrong JSON scores 0.

answer_space and gold_space say what the coordinates are:
  resized      pixels of the picture as the model saw it (Qwen2.5-VL answers so)
  thousandths  0 to 1000 along either side (Qwen2-VL and Qwen3-VL)
  original     pixels of the picture in the file, whose size is in the columns width_column and height_column
Use: worker.reward.reward_function=./rewards/grounding.py:compute_score
worker.reward.reward_function_kwargs={answer_space: resized, gold_space: original}
"""

import json
import re

from grpo_vlm.rewards.grade_extraction import last_tag

REWARD_TYPE = "batch"
NEEDS_IMAGES = True
SPACES = ("resized", "thousandths", "original")
FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)
MAX_BOXES = 100
LARGEST = 1e6  # of a coordinate


def read_boxes(text):
    """[(x1, y1, x2, y2), ...] in the text's own coordinates; None when it is no list of boxes."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) or (isinstance(value, list) and value and not isinstance(value[0], (list, dict))):
        value = [value]
    if not isinstance(value, list) or not 0 < len(value) <= MAX_BOXES:
        return None
    boxes = [box.get("bbox_2d", box.get("bbox")) if isinstance(box, dict) else box for box in value]
    return [tuple(box) for box in boxes] if all(map(is_box, boxes)) else None


def is_box(box):
    if not isinstance(box, list) or len(box) != 4:
        return False
    if not all(type(side) in (int, float) and abs(side) < LARGEST for side in box):  # NaN is not smaller either
        return False
    return box[0] < box[2] and box[1] < box[3]


def answered_boxes(response):
    answer = last_tag(response)
    answer = response.rpartition("</think>")[2] if answer is None else answer
    fenced = FENCE.findall(answer)
    return read_boxes(fenced[-1] if fenced else answer.strip())


def scale(space, item, width_column, height_column):
    """Width and height of the whole picture in the coordinates of a space."""
    if space == "thousandths":
        return 1000, 1000
    if space == "resized":
        return item["images"][0].size
    return item["columns"][width_column], item["columns"][height_column]


def iou(a, b):
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    area_a, area_b = (a[2] - a[0]) * (a[3] - a[1]), (b[2] - b[0]) * (b[3] - b[1])
    return width * height / (area_a + area_b - width * height)


def matched_iou(golds, boxes):
    pairs = sorted(((iou(g, b), i, j) for i, g in enumerate(golds) for j, b in enumerate(boxes)), reverse=True)
    total, used_golds, used_boxes = 0.0, set(), set()
    for overlap, i, j in pairs:
        if i not in used_golds and j not in used_boxes:
            used_golds.add(i)
            used_boxes.add(j)
            total += overlap
    return total / max(len(golds), len(boxes))


def compute_score(
    reward_inputs,
    answer_space="resized",
    gold_space="original",
    format_weight=0.1,
    width_column="width",
    height_column="height",
):
    if answer_space not in SPACES or gold_space not in SPACES:
        raise ValueError(f"answer_space {answer_space!r} and gold_space {gold_space!r} must be two of {SPACES}")
    scores = []
    for item in reward_inputs:
        golds, boxes = read_boxes(item["ground_truth"]), answered_boxes(item["response"])
        if golds is None:
            raise ValueError(
                f"the gold {item['ground_truth'][:80]!r} is no JSON box [x1, y1, x2, y2] or list of boxes"
            )
        overlap = 0.0
        if boxes is not None:
            sizes = [scale(space, item, width_column, height_column) for space in (gold_space, answer_space)]
            golds, boxes = (
                [(x1 / w, y1 / h, x2 / w, y2 / h) for x1, y1, x2, y2 in found]
                for found, (w, h) in zip((golds, boxes), sizes, strict=True)
            )
            overlap = matched_iou(golds, boxes)
        form = float(boxes is not None)
        scores.append(
            {"overall": (1 - format_weight) * overlap + format_weight * form, "iou": overlap, "format": form}
        )
    return scores
