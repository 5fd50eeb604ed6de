"""The bytes between client and route survive the way, and damage is noticed."""

import io
import json

import numpy as np
import pytest
import torch

from grpo_vlm.rollout.wire import (
    Answer,
    Batch,
    Failure,
    Media,
    WireRequest,
    decode_batch,
    encode_answer,
    encode_batch,
    encode_end,
    encode_failure,
    open_shared,
    read_frame,
    shared,
)


def media(kind="image", grid=(1, 2, 4), key="k", dtype=torch.float32, **other):
    rows = int(np.prod(grid))
    return Media(key, kind, torch.arange(rows * 6, dtype=torch.float32).view(rows, 6).to(dtype), grid, **other)


def ids(*values):
    return np.array(values, np.int32)


def test_a_batch_survives_the_way():
    items = [media(), media("video", (2, 2, 2), "v", torch.bfloat16, seconds_per_grid=0.5)]
    asked = [WireRequest(7, ids(1, 2, 3), (1, 0), {"seed": 2**62}), WireRequest(0, ids(4), (), {})]
    body = bytearray(b"".join(bytes(piece) for piece in encode_batch(Batch(asked, items, "adapter", hold=False))))
    back = decode_batch(body)
    assert (back.adapter, back.hold) == ("adapter", False)
    for mine, theirs in zip(back.requests, asked, strict=True):
        assert (mine.index, mine.media, mine.sampling) == (theirs.index, theirs.media, theirs.sampling)
        assert mine.token_ids.dtype == np.int32 and mine.token_ids.tolist() == theirs.token_ids.tolist()
    for mine, theirs in zip(back.media, items, strict=True):
        assert torch.equal(mine.pixels, theirs.pixels) and mine.pixels.dtype == theirs.pixels.dtype
        assert (mine.key, mine.kind, mine.grid) == (theirs.key, theirs.kind, theirs.grid)
        assert mine.seconds_per_grid == theirs.seconds_per_grid
    for damaged in (b"", b"other" + body, body[:-1], body + b"\0"):
        with pytest.raises(ValueError, match="body"):
            decode_batch(bytearray(damaged))


def test_shared_memory_is_read_while_it_is_named_and_no_other_file_is():
    pieces = encode_batch(Batch([WireRequest(0, ids(1, 2), (0,), {})], [media()]))
    with shared(pieces) as body:
        memory = open_shared(body)
        forged = json.dumps(json.loads(body) | {"name": "grpo_vlm-0"}).encode()
        with pytest.raises(ValueError, match="not of this machine"):
            open_shared(forged)
    assert torch.equal(decode_batch(memory).media[0].pixels, media().pixels)  # a view outlives the name
    with pytest.raises(OSError, match="No such file"):
        open_shared(body)
    with pytest.raises(ValueError, match="not a file descriptor"):
        open_shared(json.dumps({"path": "/etc/passwd", "name": "x"}).encode())


def test_frames_survive_the_way_and_a_cut_stream_is_noticed():
    sent = Answer(3, ids(1, 2), [ids(5, 6), ids(7)], [np.float32([-1, -2]), np.float32([-3])], ["stop", "length"])
    stream = encode_answer(sent) + encode_failure(Failure(1, 400, "no")) + encode_end()
    read = io.BytesIO(stream).read
    back, failure, end = read_frame(read), read_frame(read), read_frame(read)
    assert (back.index, back.reasons, back.prompt_ids.tolist()) == (3, ["stop", "length"], [1, 2])
    assert [part.tolist() for part in back.token_ids + back.logprobs] == [[5, 6], [7], [-1, -2], [-3]]
    assert failure == Failure(1, 400, "no") and end is None
    for cut in (0, 5, 40, len(encode_answer(sent)) - 1):
        with pytest.raises(EOFError):
            read_frame(io.BytesIO(stream[:cut]).read)
