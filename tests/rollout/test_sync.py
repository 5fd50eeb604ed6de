"""How weights travel, up to where a GPU or a server begins: chunks, layouts, handles, who sends, what is left behind.
(Weights in a real server: test_sync_live.py. Which weights: test_weights.py.)"""

import inspect
import json
import multiprocessing
import os
import signal
import time
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout import packed_buffer, sync, sync_packed
from grpo_vlm.rollout.failures import ServerGone
from grpo_vlm.rollout.packed_buffer import Handle, Layout, rebuild_arguments, unpack
from grpo_vlm.rollout.sync import FileSync, WeightSync, folder_prefix, remove_left_folders
from grpo_vlm.rollout.sync_packed import IPCSync, NCCLSync, beside, own_address

FORK = multiprocessing.get_context("fork")  # new interpreters would import for half a minute


class Model(nn.Module):
    """Of several types and shapes, so that bytes have to be aligned."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.inner = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 3))
        self.register_buffer("count", torch.tensor([7, 2**40]))

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head


class Client:
    """Answers control routes. on_update(update_info) is the server's part of a chunk."""

    url = "http://127.0.0.1:8000"

    def __init__(self, on_update=lambda info: None):
        self.on_update, self.seen, self.resets = on_update, [], [True]

    def post(self, path, body=None):
        self.seen.append(path)
        json.dumps(body)  # what travels must be JSON
        if path == "/update_weights":
            self.on_update(body["update_info"])
        if path == "/reset_prefix_cache":
            return {"success": self.resets.pop(0) if len(self.resets) > 1 else self.resets[0]}
        return None

    def get(self, path):
        return {"world_size": 2}


def accelerator(processes=1):
    return SimpleNamespace(
        unwrap_model=lambda model: model,
        state=SimpleNamespace(deepspeed_plugin=None),
        num_processes=processes,
        device=torch.device("cpu"),
        wait_for_everyone=lambda: dist.barrier() if processes > 1 else None,
    )


def file_sync(client, folder):
    sync.SHARED_MEMORY = folder
    return FileSync(client, accelerator(), torch.float32, folder), Model()


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch):
    monkeypatch.setattr(sync, "SHARED_MEMORY", sync.SHARED_MEMORY)  # file_sync sets it


# ---- files


def killed_in_a_sync(folder):
    """A sync of real weights by a process that is killed while the server loads them."""
    transfer, model = file_sync(Client(lambda info: os.kill(os.getpid(), signal.SIGKILL)), folder)
    transfer.send(model)


def test_folders_of_killed_processes_are_removed_and_no_others(tmp_path):
    process = FORK.Process(target=killed_in_a_sync, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert (left / "weights.safetensors").stat().st_size > 64
    dead = left.name.removeprefix(folder_prefix()).partition("-")[0]
    kept = [f"{folder_prefix()}{os.getpid()}-abc", f"grpo_vlm-elsewhere.{dead}-{dead}-abc", f"other-{dead}-abc"]
    for name in kept:
        (tmp_path / name).mkdir()
    assert remove_left_folders(tmp_path, tmp_path / "absent") == [left]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_one_file_at_a_time_and_none_is_left(tmp_path, monkeypatch):
    seen = []

    def look(info):
        (folder,) = os.listdir(tmp_path)
        assert folder.startswith(f"{folder_prefix()}{os.getpid()}-")
        (file,) = (tmp_path / folder).iterdir()
        seen.append((str(file) == info["path"], file.stat().st_size < 800, info["whole"]))

    client = Client(look)
    transfer, model = file_sync(client, tmp_path)
    monkeypatch.setattr(sync, "CHUNK_BYTES", 60)
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert transfer.send(model)["sync/gb"] == total / 1e9
    assert len(seen) >= 4 and set(seen) == {(True, True, True)} and not os.listdir(tmp_path)
    assert client.seen[0] == "/start_weight_update"
    assert client.seen[-2:] == ["/finish_weight_update", "/reset_prefix_cache"]  # there is no tower


def test_a_small_or_distant_shared_memory_is_not_used(tmp_path):
    assert sync.roomy_place(10, tmp_path, here=True) == sync.SHARED_MEMORY
    assert sync.roomy_place(10, tmp_path, here=False) == tmp_path
    assert sync.roomy_place(2**60, tmp_path, here=True) == tmp_path


def test_a_prefix_cache_that_is_in_use_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sync, "RESET_PAUSE_S", 0.0)
    client = Client()
    transfer, model = file_sync(client, tmp_path)
    client.resets = [False, False, True]
    transfer.send(model)
    assert client.seen.count("/reset_prefix_cache") == 3
    client.resets = [False]
    with pytest.raises(RolloutError, match="did not drop its prefix cache"):
        transfer.send(model)


def test_what_does_not_train_is_sent_once_and_again_when_the_server_lost_it(tmp_path):
    transfer, model = file_sync(Client(), tmp_path)
    model.inner.requires_grad_(False)
    whole = transfer.send(model)["sync/gb"]
    part = transfer.send(model)["sync/gb"]
    assert part == pytest.approx(whole - sum(p.nbytes for p in model.inner.parameters()) / 1e9)
    transfer.forget()
    assert transfer.send(model)["sync/gb"] == whole
    transfer.client.on_update = lambda info: (_ for _ in ()).throw(ServerGone("it fell"))
    with pytest.raises(RolloutError, match="it fell"):
        transfer.send(model)
    assert transfer.client.seen[-1] == "/finish_weight_update"  # a server that goes on must not wait for more
    transfer.client.on_update = lambda info: None
    assert transfer.send(model)["sync/gb"] == whole


# ---- packed buffers


def test_a_buffer_gives_back_what_was_put_into_it():
    tensors = dict(Model().state_dict()) | {"half": torch.arange(3).bfloat16(), "flag": torch.tensor(True)}
    buffer, layout = torch.zeros(4096, dtype=torch.uint8), Layout()
    for name, tensor in tensors.items():
        assert layout.room(tensor.nbytes) <= layout.size + tensor.nbytes + packed_buffer.ALIGNMENT
        layout.add(name, tensor, buffer)
    found = unpack(buffer, Layout(**json.loads(json.dumps(asdict(layout)))))
    buffer.fill_(255)  # the next chunk
    assert list(dict(found)) == list(tensors)
    for name, tensor in found:
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])


def test_a_handle_has_torchs_arguments_in_torchs_order():
    handle = Handle(640, "bWVt", 1000, 16, "Y250", 3, "ZXZl", True)
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    given = dict(zip(names, rebuild_arguments(handle, 2), strict=True))
    assert (given["storage_handle"], given["storage_size_bytes"], given["storage_offset_bytes"]) == (b"mem", 1000, 16)
    assert (given["ref_counter_handle"], given["ref_counter_offset"]) == (b"cnt", 3)
    assert (given["event_handle"], given["event_sync_required"]) == (b"eve", True)
    assert (given["storage_device"], given["tensor_offset"], given["tensor_stride"]) == (2, 0, (1,))
    assert (given["tensor_size"], given["dtype"]) == (torch.Size([640]), torch.uint8)
    made = inspect.getsource(packed_buffer.make_handle)
    assert "arguments[7:]" in made and names.index("storage_handle") == 7 and len(names) == 15
    assert len(fields(Handle)) == 8


class Wire:
    """A broadcast between two threads of one process, in the place of NCCL."""

    def __init__(self):
        self.sent, self.destroyed = [], False

    def broadcast(self, tensor, src, stream):
        if self.sent is None:
            time.sleep(60)  # a broadcast of which the other half never comes
        self.sent.append(tensor)

    def destroy(self):
        self.destroyed = True

    def receive(self, tensor, src, stream):
        while not self.sent:
            time.sleep(0.001)
        tensor.copy_(self.sent.pop())


def engine_of(name):
    """The server's side without a server: where a chunk's tensors are, and nothing else of it."""
    from grpo_vlm.rollout import weight_engines  # imports vLLM

    engine = object.__new__(getattr(weight_engines, name))
    engine.device = torch.device("cpu")
    return engine, weight_engines.PackedUpdate


def test_weights_that_are_broadcast_arrive(monkeypatch):
    wire, (engine, update), arrived = Wire(), engine_of("NCCLWeightEngine"), {}
    engine.group = SimpleNamespace(broadcast=wire.receive)
    monkeypatch.setattr(sync_packed, "CHUNK_BYTES", 100)
    transfer = NCCLSync(
        Client(lambda info: arrived.update(engine.tensors(update(**info)))), accelerator(), torch.float32
    )
    transfer.group, model = wire, Model()
    transfer.send(model)
    assert transfer.client.seen.count("/update_weights") >= 3
    assert arrived.keys() == model.state_dict().keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in model.state_dict().items())
    transfer.dtype = torch.bfloat16
    transfer.send(model)
    assert arrived["count"].dtype == torch.int64 and arrived["head.weight"].dtype == torch.bfloat16
    assert torch.equal(arrived["head.weight"], model.head.weight.bfloat16())


def test_a_server_that_falls_during_a_broadcast_is_not_waited_for():
    def fall(info):
        raise ServerGone("it fell")

    transfer = NCCLSync(Client(fall), accelerator(), torch.float32)
    transfer.group = wire = Wire()
    wire.sent = None
    began = time.monotonic()
    with pytest.raises(RolloutError, match="it fell"):
        transfer.send(Model())
    assert time.monotonic() - began < 10 and wire.destroyed and transfer.group is None


def test_the_group_of_a_dedicated_server_is_met_at_a_free_port_of_the_way_to_it(monkeypatch):
    asked = []
    monkeypatch.setattr(sync_packed, "join_group", lambda *args: asked.append(args) or "group")
    transfer = NCCLSync(Client(), accelerator(), torch.float32)
    transfer.connect()
    ((address, port, rank, size, _),) = asked
    assert (address, rank, size, transfer.group) == ("127.0.0.1", 0, 3, "group") and 1024 < port < 65536
    assert transfer.client.seen == ["/init_weight_transfer_engine"]
    assert own_address("http://127.0.0.1:9")[0] == "127.0.0.1"


def test_work_beside_a_request_that_fails_is_left_alone():
    assert beside(lambda: 5, lambda: None) == 5
    with pytest.raises(RolloutError, match=r"transfer of weights failed: ZeroDivisionError"):
        beside(lambda: 1 / 0, lambda: None)


class FourHands(IPCSync):
    """IPC between two training processes and one server without a GPU: a handle names a file with the buffer."""

    def _uuid(self):
        return f"GPU-{dist.get_rank()}"


def of_two(rank: int, folder: Path) -> None:
    """One of two ranks; rank 0 leads. Each checks what a worker on its own GPU would find."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, not used: the group is there
    PartialState._reset_state()  # the parent's
    PartialState(cpu=True)
    place = folder / f"buffer-{rank}"
    sync_packed.CHUNK_BYTES = 100
    sync_packed.make_handle = lambda buffer: Handle(len(buffer), str(place), 0, 0, "", 0, "", False)
    sync_packed.PackedSync._allocate = lambda self, size: torch.from_file(str(place), True, size, dtype=torch.uint8)
    torch.cpu.ipc_collect = lambda: None
    arrived: list[dict] = [{}, {}]

    def load(info):
        assert sorted(info["handles"]) == ["GPU-0", "GPU-1"]
        for number in range(2):
            handle = info["handles"][f"GPU-{number}"]
            buffer = torch.from_file(handle["memory"], True, handle["nbytes"], dtype=torch.uint8)
            arrived[number].update(unpack(buffer, Layout(**info["layout"])))

    client, model = Client(load) if rank == 0 else None, Model()
    transfer = FourHands(client, accelerator(2), torch.float32)
    transfer.send(model)
    if rank == 0:
        assert client.seen.count("/update_weights") >= 3
        for found in arrived:
            assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
        client.on_update = lambda info: (_ for _ in ()).throw(ServerGone("it fell"))
    try:
        transfer.send(model)
    except RolloutError as error:
        assert "it fell" in str(error)
    else:
        raise AssertionError("rank has not been told")
    dist.destroy_process_group()


def test_every_training_process_shares_a_buffer_of_its_own_gpu(tmp_path):
    ranks = [FORK.Process(target=of_two, args=(rank, tmp_path), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]


def test_a_worker_whose_gpu_no_training_process_has_says_so(monkeypatch):
    engine, update = engine_of("IPCWeightEngine")
    monkeypatch.setattr(torch.cpu, "get_device_properties", lambda device: SimpleNamespace(uuid="u3"), raising=False)
    with pytest.raises(ValueError, match="shares memory of GPU u3 with the server; those of u1, u2 do"):
        engine.tensors(update({}, True, {"u1": {}, "u2": {}}))


def test_all_ways_are_transfers_with_a_backend_of_the_plugin():
    from grpo_vlm.rollout.file_weights import ENGINES
    from grpo_vlm.rollout.sync_adapter import AdapterSync

    assert {kind.backend for kind in (FileSync, IPCSync, NCCLSync)} == set(ENGINES)
    assert AdapterSync.sleep_level == 1 and WeightSync.sleep_level == 2
