"""Score a demo model on held-out easy-VQA questions, with transformers alone.

A question counts as answered when the response, stripped, is exactly `\\boxed{ANSWER}`; it counts as named when ANSWER
is one of the response's words in whatever form. The data is balanced over the 13 answers, so a model that ignores the
picture scores about 0.23; the last number is the score after each row was given the picture of a row with another
answer.

    python -m grpo_vlm.data.prepare easyvqa --out data/easyvqa
    python -m grpo_vlm.demo.evaluate grpo_vlm/demo/model --data data/easyvqa/test.parquet
"""

import argparse
import io
import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin

ASKED_FORM = " Answer in \\boxed{}."  # what configs/prompts/boxed.jinja adds to a question
IMAGE_MARK = "<image>"
VISION_TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"]
MAX_NEW_TOKENS = 16
SAMPLES = 4
BATCH_ROWS = 130


@dataclass(frozen=True)
class Question:
    """One row: rendered prompt, its picture, the right answer."""

    prompt: str
    picture: Image.Image
    answer: str


def load_questions(path: Path, processor: ProcessorMixin) -> list[Question]:
    """Read rows of the columns images, problem and answer, and render their prompts with the chat template."""
    questions = []
    for row in pyarrow.parquet.read_table(path).to_pylist():
        text = row["problem"].replace(IMAGE_MARK, "").strip() + ASKED_FORM
        content = [{"type": "image"}, {"type": "text", "text": text}]
        messages = [{"role": "user", "content": content}]
        prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        picture = Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB")
        questions.append(Question(prompt, picture, row["answer"]))
    return questions


@torch.no_grad()
def respond(
    model: PreTrainedModel, processor: ProcessorMixin, questions: list[Question], samples: int
) -> list[list[str]]:
    """Responses to each question: `samples` drawn at temperature 1, or one greedy response if samples is 0."""
    tokenizer = processor.tokenizer
    banned = [token for token in tokenizer.convert_tokens_to_ids(VISION_TOKENS) if token is not None]
    choice = {"do_sample": False, "temperature": None}
    if samples:
        choice = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": samples}
    responses = []
    for start in range(0, len(questions), BATCH_ROWS):
        batch = questions[start : start + BATCH_ROWS]
        inputs = processor(
            text=[question.prompt for question in batch],
            images=[question.picture for question in batch],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(model.device)
        tokens = model.generate(**inputs, **choice, max_new_tokens=MAX_NEW_TOKENS, suppress_tokens=banned)
        texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        count = max(1, samples)
        responses += [texts[i : i + count] for i in range(0, len(texts), count)]
    return responses


def score(questions: list[Question], responses: list[list[str]]) -> tuple[float, float]:
    """Shares of the responses that are exactly the asked form, and that name the answer in any form."""
    pairs = [(text, question.answer) for question, texts in zip(questions, responses, strict=True) for text in texts]
    exact = sum(text.strip() == f"\\boxed{{{answer}}}" for text, answer in pairs)
    named = sum(answer in text.replace("{", " ").replace("}", " ").split() for text, answer in pairs)
    return exact / len(pairs), named / len(pairs)


def shuffle_pictures(questions: list[Question], seed: int) -> list[Question]:
    """Give each question the picture of a random question with another answer."""
    generator = torch.Generator().manual_seed(seed)
    answers = [question.answer for question in questions]
    source = torch.randperm(len(questions), generator=generator).tolist()
    for i, answer in enumerate(answers):
        for j in torch.randperm(len(questions), generator=generator).tolist():
            if answers[source[i]] != answer:
                break
            if answers[source[j]] != answer and answers[source[i]] != answers[j]:
                source[i], source[j] = source[j], source[i]
    return [Question(q.prompt, questions[source[i]].picture, q.answer) for i, q in enumerate(questions)]


def evaluate(model_folder: Path, data: Path, seed: int = 0) -> dict[str, float]:
    """All five numbers of a saved model, computed in float32: exact and named shares, each sampled and greedy."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    processor = AutoProcessor.from_pretrained(model_folder)
    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32).to(device).eval()
    questions = load_questions(data, processor)
    torch.manual_seed(seed)
    sampled, sampled_named = score(questions, respond(model, processor, questions, SAMPLES))
    greedy, greedy_named = score(questions, respond(model, processor, questions, 0))
    shuffled = shuffle_pictures(questions, seed)
    blind, _ = score(shuffled, respond(model, processor, shuffled, SAMPLES))
    return {
        "sampled": sampled,
        "greedy": greedy,
        "sampled_named": sampled_named,
        "greedy_named": greedy_named,
        "sampled_shuffled_pictures": blind,
        "rows": len(questions),
    }


def main() -> None:
    """Parse the command line, score, print."""
    parser = argparse.ArgumentParser(description="Score a demo model on held-out easy-VQA questions.")
    parser.add_argument("model", type=Path, help="folder of a saved model with its processor")
    parser.add_argument(
        "--data", type=Path, default=Path("data/easyvqa/test.parquet"), help="parquet file of questions"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling and of the pictures' shuffle")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    numbers = evaluate(arguments.model, arguments.data, arguments.seed)
    if arguments.json:
        print(json.dumps(numbers))
        return
    print(f"{arguments.model} on {numbers['rows']} questions of {arguments.data}")
    print(f"  right answer in the asked form   sampled {numbers['sampled']:.3f}   greedy {numbers['greedy']:.3f}")
    print(
        f"  right answer in any form         sampled {numbers['sampled_named']:.3f}   "
        f"greedy {numbers['greedy_named']:.3f}"
    )
    print(f"  asked form, shuffled pictures    sampled {numbers['sampled_shuffled_pictures']:.3f}")


if __name__ == "__main__":
    main()
