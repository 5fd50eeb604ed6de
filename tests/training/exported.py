"""Run by test_resume_sharded.py: vLLM's log-probs of a fixed text after a picture, of each model folder that is named.

Prints a line of JSON per folder: the token ids and their log-probs. In a process of its own, because vLLM's settings
are the environment's.
"""

import gc
import json
import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

from PIL import Image
from transformers import AutoProcessor

TEXT = "<|vision_start|><|image_pad|><|vision_end|>What is this? A picture of nothing much, and more text."


def picture() -> Image.Image:
    """84 x 56 pixels with a gradient."""
    return Image.merge("RGB", [Image.linear_gradient("L").resize((84, 56)).rotate(90 * turn) for turn in range(3)])


if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    for folder in sys.argv[1:]:
        AutoProcessor.from_pretrained(folder)
        llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=512, gpu_memory_utilization=0.2)
        settings = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
        (answer,) = llm.generate(
            [{"prompt": TEXT, "multi_modal_data": {"image": picture()}}], settings, use_tqdm=False
        )
        ids = list(answer.prompt_token_ids)
        found = [entry[token].logprob for token, entry in zip(ids[1:], answer.prompt_logprobs[1:], strict=True)]
        print("scored " + json.dumps({"ids": ids, "logprobs": found}), flush=True)
        del llm
        gc.collect()
