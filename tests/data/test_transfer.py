"""Messages between processes: equal at the other end, shared arrays once, and memory that is not copied."""

import socket
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from grpo_vlm.data import PromptDataset, transfer


def message(value) -> memoryview:
    pieces = transfer.dumps(value)
    memory = memoryview(bytearray(transfer.size_of(pieces)))
    transfer.write(pieces, memory)
    return memory


def test_a_tensor_that_two_share_is_in_the_message_once():
    pixels = torch.randn(500, 300)
    memory = message([{"a": pixels, "b": pixels[:0]}, [pixels]])
    assert len(memory) < pixels.nbytes + 2000
    (first, (second,)) = transfer.loads(memory)
    assert torch.equal(first["a"], pixels) and first["b"].shape == (0, 300)
    assert first["a"].data_ptr() == second.data_ptr() == second.untyped_storage().data_ptr()
    second[0, 0] = 7.0  # it lies in the message
    assert first["a"][0, 0] == 7.0 and 7.0 in np.frombuffer(memory, dtype=np.float32)


def test_part_of_a_tensor_takes_no_more_than_its_own_bytes():
    assert len(message(torch.zeros(10_000, 100)[7:9])) < 3000


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "I;16"])
def test_pictures_of_every_kind_stay_what_they_are(mode):
    picture = Image.linear_gradient("L").convert(mode)
    arrived = transfer.loads(message(picture))
    assert (arrived.mode, arrived.size, arrived.tobytes()) == (mode, picture.size, picture.tobytes())


def test_prompts_through_a_socket(processor, data_config):
    table = [{"problem": "<image>?", "images": [Image.effect_noise((200, 150), 50)], "answer": "a", "more": [1]}] * 2
    prompts = PromptDataset(table, data_config(), processor).prompts([0, 1])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transfer.send(ours, prompts)  # nobody reads yet
        transfer.send(ours, "next")
        first, second = transfer.receive(theirs)
        assert transfer.receive(theirs) == "next"
        ours.close()
        with pytest.raises(ConnectionError):
            transfer.receive(theirs)
        with pytest.raises(ConnectionError):
            transfer.send(theirs, 1)
    assert torch.equal(first.pixel_values, prompts[0].pixel_values)
    assert first.pixels[0].data_ptr() == second.pixels[0].data_ptr()
    assert first.images[0].tobytes() == prompts[0].images[0].tobytes()
    assert first.columns == {"problem": "<image>?", "answer": "a", "more": [1]}
    assert first.token_ids == prompts[0].token_ids and first.image_keys == prompts[0].image_keys


def test_a_large_message_waits_for_nobody():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=transfer.send, args=(ours, torch.ones(8_000_000)), daemon=True)
        sender.start()
        sender.join(timeout=20)
        assert not sender.is_alive()
        assert transfer.receive(theirs).sum() == 8_000_000
