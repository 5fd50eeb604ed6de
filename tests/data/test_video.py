"""Videos: real clips decode to their true frame counts or are refused by name; what is shown follows qwen-vl-utils and
is what the processor itself makes of it."""

import json
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from qwen_vl_utils import vision_process

from grpo_vlm.data.pictures import metadata
from grpo_vlm.data.rows import PromptBuilder
from grpo_vlm.data.video import VideoRule, clip_shape, read_clip
from grpo_vlm.errors import DataError, MediaError

CLIPS = Path(__file__).parent / "video"
MANIFEST = json.loads((CLIPS / "manifest.json").read_text())
RULE = VideoRule(2.0, 4, 768, 3136, 20000, None, factor=28, temporal=2)
RED = Image.new("RGB", (90, 60), "red")
EXAMPLE, NASA = str(CLIPS / "example.mp4"), str(CLIPS / "nasa_13013.mp4")  # 50 and 325 frames at 25 a second


@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["file"])
def test_real_clips(entry):
    path = str(CLIPS / entry["file"])
    if entry["load"] == "reject":
        for function in (clip_shape, read_clip):
            with pytest.raises(MediaError, match=f"{entry['file']}: cannot be decoded: InvalidDataError"):
                function(path, RULE)
        return
    frames, shape = read_clip(path, RULE)
    assert shape == clip_shape(path, RULE) == clip_shape({"bytes": Path(path).read_bytes(), "path": None}, RULE)
    assert shape.total == entry["frames"] and shape.fps == pytest.approx(entry["fps"])
    assert frames.shape == (len(shape.indices), shape.size[1], shape.size[0], 3) and frames.dtype == np.uint8
    assert shape.indices[0] == 0 and shape.indices[-1] == entry["frames"] - 1
    limits = {"fps": 2.0, "min_frames": 4, "max_frames": min(768, shape.total)}
    assert len(shape.indices) == vision_process.smart_nframes(limits, shape.total, shape.fps)
    assert shape.size[0] % 28 == shape.size[1] % 28 == 0


def all_frames(path):
    with av.open(path) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.mark.parametrize("file", ["example.mp4", "bunny.webm", "h264_10bit.mp4", "av1.mkv"])
@pytest.mark.parametrize("total_pixels", [None, 60000])
def test_frames_are_those_of_qwen_vl_utils(monkeypatch, file, total_pixels):
    path = str(CLIPS / file)
    rule = replace(RULE, total_pixels=total_pixels)
    frames, shape = read_clip(path, rule)
    whole = torch.from_numpy(all_frames(path)).permute(0, 3, 1, 2)

    def reader(asked):
        count = vision_process.smart_nframes(asked, len(whole), shape.fps)
        taken = torch.linspace(0, len(whole) - 1, count).round().long()
        return whole[taken], {"frames_indices": taken.tolist()}, count / len(whole) * shape.fps

    monkeypatch.setattr(vision_process, "get_video_reader_backend", lambda: "torchvision")
    monkeypatch.setitem(vision_process.VIDEO_READER_BACKENDS, "torchvision", reader)
    asked = {"video": path, "fps": 2.0, "min_pixels": 3136, "max_pixels": 20000}
    asked |= {} if total_pixels is None else {"total_pixels": total_pixels}
    (theirs, about), fps = vision_process.fetch_video(asked, return_video_sample_fps=True, return_video_metadata=True)
    assert torch.equal(torch.from_numpy(frames).permute(0, 3, 1, 2).float(), theirs)
    assert about["frames_indices"] == list(shape.indices) and fps == pytest.approx(shape.shown_fps)


@pytest.mark.parametrize(
    ("own", "indices"),
    [
        ({}, 26),
        ({"fps": 1.0}, 12),
        ({"fps": 4, "max_frames": 8}, 8),
        ({"min_frames": 40}, 40),
        ({"nframes": 6}, 6),
        ({"video_start": 2.0, "video_end": 4.0, "fps": None}, 4),
    ],
)
def test_a_rows_own_settings_come_first(own, indices):
    shape = clip_shape({"video": NASA} | own, RULE)
    assert len(shape.indices) == indices and shape.total == 325
    if "video_start" in own:
        assert (shape.indices[0], shape.indices[-1]) == (50, 100)
    assert clip_shape({"path": NASA, "max_pixels": 5000, "bytes": None}, RULE).size == (84, 28)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"video": EXAMPLE, "frame_rate": 2}, "it has the keys frame_rate, which are not known; known: fps, min_fr"),
        ({"video": EXAMPLE, "fps": 0}, "its fps is 0; it must be a number above 0"),
        ({"video": EXAMPLE, "fps": float("nan")}, "its fps is nan; it must be a number above 0"),
        ({"video": EXAMPLE, "nframes": "4"}, "its nframes is '4'; it must be a number above 0"),
        ({"video": EXAMPLE, "video_start": "1"}, "its video_start is '1'; it must be a number above 0"),
        ({"video": EXAMPLE, "fps": 1e300}, "its fps is 1e.300; it must be at most 1000"),
        ({"video": [RED, RED], "sample_fps": 1001}, "its sample_fps is 1001; it must be at most 1000"),
        (
            {"video": EXAMPLE, "min_frames": 9, "max_frames": 8},
            "its min_frames of 9 are more than its max_frames of 8",
        ),
        ({"video": EXAMPLE, "min_frames": 1000}, "its min_frames of 1000 are more .* data.video_max_frames.; change"),
        ({"video": [RED, RED], "sample_fps": 0}, "its sample_fps is 0; it must be a number above 0"),
        ({"video": EXAMPLE, "max_frames": 1}, "its max_frames is 1; it must be a number of at least 2"),
        ({"video": EXAMPLE, "fps": 1, "nframes": 4}, "both fps and nframes; keep one"),
        ({"video": EXAMPLE, "nframes": 90}, r"\(640x480, 50 frames at 25 a second\) nframes should in interval"),
        ({"video": EXAMPLE, "video_start": 9.0}, "50 frames at 25 a second.*Invalid time range"),
        ({"video": EXAMPLE, "use_audio_in_video": True}, "use_audio_in_video, which are not known"),
        ({"video": None, "fps": 2}, "it needs 'video', 'path' or 'bytes'"),
        ({"video": []}, "its list of frames is empty"),
        ([RED, Image.new("RGB", (60, 90))], r"its frames have the sizes \[\(60, 90\), \(90, 60\)\]; make them equal"),
        (RED, "it is a single picture"),
        ("gone.mp4", "gone.mp4 does not exist"),
        (b"no video", "cannot be decoded: InvalidDataError"),
        ("https://example.com/a.mp4", "is a link, .*allow_remote_media"),
    ],
)
def test_unusable_entries_say_what_is_wrong(entry, message):
    with pytest.raises(DataError, match=message):
        clip_shape(entry, RULE)


def test_a_clip_cut_short_is_refused_or_has_fewer_frames(tmp_path):
    data = (CLIPS / "av1.mkv").read_bytes()
    assert clip_shape(data[: len(data) // 2], RULE).total < 125  # a Matroska file is playable up to its cut
    data = (CLIPS / "example.mp4").read_bytes()
    with pytest.raises(MediaError, match="cannot be decoded"):
        clip_shape(data[: len(data) // 2], RULE)


def test_a_file_with_sound_alone_is_refused(tmp_path):
    with av.open(str(tmp_path / "a.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), layout="mono")
        frame.sample_rate = 8000
        container.mux([*stream.encode(frame), *stream.encode()])
    with pytest.raises(MediaError, match=r"a\.wav: the file has no video, only 1 other streams"):
        clip_shape(str(tmp_path / "a.wav"), RULE)


def test_a_clip_filmed_on_its_side_is_turned_upright(tmp_path):
    """The picture matrix in the header says: a quarter turn clockwise."""
    data = (CLIPS / "example.mp4").read_bytes()
    one, none, minus = (value.to_bytes(4, "big", signed=True) for value in (65536, 0, -65536))
    identity, turned = (one, none, none, none, one, none), (none, one, none, minus, none, none)
    place = data.index(b"".join(identity), data.index(b"tkhd"))
    (tmp_path / "a.mp4").write_bytes(data[:place] + b"".join(turned) + data[place + 24 :])
    rule = replace(RULE, max_pixels=640 * 480)
    upright, shape = read_clip(str(tmp_path / "a.mp4"), rule)
    plain, plain_shape = read_clip(EXAMPLE, rule)
    assert shape.size == plain_shape.size[::-1]
    difference = np.abs(np.rot90(plain[0], -1).astype(int) - upright[0])
    assert difference.mean() < 2 < np.abs(np.rot90(plain[0], 1).astype(int) - upright[0]).mean()


def test_lists_of_frames_are_the_frames():
    stills = [Image.new("RGB", (56, 56), (10 * number, 0, 0)) for number in range(5)]
    frames, shape = read_clip({"video": stills, "sample_fps": 4.0}, RULE)
    assert frames[:, 5, 5, 0].tolist() == [0, 10, 20, 30, 40, 40]  # an even number: the last one again
    assert shape.indices == (0, 1, 2, 3, 4, 4) and shape.shown_fps == 4.0
    frames, shape = read_clip(stills, replace(RULE, max_frames=3))
    assert shape.indices == (0, 4) and frames[:, 5, 5, 0].tolist() == [0, 40]
    one, shape = read_clip([stills[3]], RULE)
    assert len(one) == 2 and shape.indices == (0, 0)


def row(problem, videos, images=(), **columns):
    return {"problem": problem, "videos": videos, "images": list(images), "answer": "a"} | columns


ROWS = [
    row("<video>What moves?", [EXAMPLE]),
    row("One <video> and <image> and <video>", [str(CLIPS / "h264_10bit.mp4"), {"video": NASA, "nframes": 6}], [RED]),
    row("Frames: <video>", [RED] * 3),
    row("Frames: <video><video>", [[RED] * 4, {"video": [RED] * 2}]),
    row("<video>?", str(CLIPS / "bunny.webm")),
]


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_ids_pixels_and_times_equal_the_processors_own(processor, data_config, number):
    config = data_config(max_pixels=20000, max_prompt_length=2000)
    builder = PromptBuilder(config, processor)
    prompt = builder.build(ROWS[number], "r:0")
    full = processor(
        text=[prompt.text],
        images=prompt.images or None,
        videos=[torch.from_numpy(clip.frames).permute(0, 3, 1, 2) for clip in prompt.videos],
        video_metadata=[metadata(clip.shape) for clip in prompt.videos],
        do_resize=False,
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert prompt.token_ids == full["input_ids"][0].tolist()
    assert torch.equal(torch.cat([clip.pixels for clip in prompt.videos]), full["pixel_values_videos"])
    assert torch.equal(prompt.video_grid_thw, full["video_grid_thw"])
    if "second_per_grid_ts" in full:  # Qwen2.5-VL; Qwen3-VL has its times in the text
        seconds = torch.tensor([clip.seconds_per_grid for clip in prompt.videos])
        torch.testing.assert_close(full["second_per_grid_ts"], seconds)
    sizes = builder.picture_sizes(ROWS[number], "r:0")
    assert builder.prompt_length(ROWS[number], "r:0", sizes) == len(prompt.token_ids)
    assert builder.image_tokens(sizes) == sum(
        prompt.token_ids.count(token) for token in (processor.image_token_id, processor.video_token_id)
    )


def test_equal_videos_are_made_once_and_unequal_ones_have_other_keys(processor, data_config):
    builder = PromptBuilder(data_config(max_pixels=20000, max_prompt_length=2000), processor)
    store = builder.pictures()
    same, slower = [EXAMPLE, {"path": EXAMPLE}], {"video": EXAMPLE, "fps": 4}
    prompts = [builder.build(row("<video>?", [video]), "r", store) for video in (*same, slower)]
    first, second, third = (prompt.videos[0] for prompt in prompts)
    assert first is second or first.pixels.data_ptr() == second.pixels.data_ptr()
    assert first.key == second.key != third.key and len(third.frames) == 8
    stills = [RED] * 4
    fast, slow = ({"video": stills, "sample_fps": rate} for rate in (4, 1))
    keys = {builder.build(row("<video>?", [video]), "r", store).videos[0].key for video in (fast, slow)}
    assert len(keys) == 2  # the same frames at other times


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            row("<video>?", [EXAMPLE, EXAMPLE]),
            "r:3: 1 <video> marks in column 'problem' but 2 videos in column 'videos'",
        ),
        (row("<video>?", []), "r:3: 1 <video> marks .* but 0 videos"),
        (row("<video>?", ["gone.mp4"]), "r:3: column 'videos', video 0: gone.mp4 does not exist"),
        (row("?", [], audios=["a.wav"]), "r:3: column 'audios' is filled, but audio is not supported"),
        (row("<video><|video_pad|>", [EXAMPLE]), "r:3: the chat template gives 2 video tokens for 1 videos"),
        (row("<video>?", [EXAMPLE]), r"r:3: the prompt has \d+ tokens \(\d+ of them for media\), data.max_prompt_le"),
    ],
)
def test_faults_name_row_and_column(processor, data_config, bad, message):
    with pytest.raises(DataError, match=message):
        PromptBuilder(data_config(max_pixels=30000, max_prompt_length=60), processor).build(bad, "r:3")
