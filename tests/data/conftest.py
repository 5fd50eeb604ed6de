"""Both tiny processors and a `data` section that fits them."""

from dataclasses import replace

import pytest
from transformers import AutoProcessor

from grpo_vlm.config import Config
from tests.tiny import tiny_model


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen3_vl"])
def processor(request, tmp_path_factory):
    return AutoProcessor.from_pretrained(tiny_model(request.param, tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def data_config():
    """A function: the `data` section with these keys changed."""

    def make(**keys):
        small = {"prompt_key": "problem", "min_pixels": 3136, "max_pixels": 100352, "max_prompt_length": 512}
        return replace(Config().data, **(small | keys))

    return make
