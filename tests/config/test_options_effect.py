"""Every option does something: set to another value its effect is seen, or it is refused, or a notice says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_vlm.config import Config, load_and_check
from grpo_vlm.config.keys import schema_options
from grpo_vlm.config.options import NEUTRAL, PLANNED, WORKS
from grpo_vlm.errors import ConfigError
from tests.config import probes as table

ROOT = Path(__file__).parents[2]
WORKING = [key for key, option in schema_options().items() if option.status == WORKS]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("options")
    table.make_files(folder)
    return folder


@pytest.fixture(scope="module")
def observe(place: Path) -> Callable[[table.Observer, dict[str, Any]], Any]:
    """What an observer sees of the base settings with changes; each once."""
    seen: dict[tuple, Any] = {}
    count = [0]

    def look(observer: table.Observer, changes: dict[str, Any]) -> Any:
        key = (observer, repr(sorted(changes.items())))
        if key not in seen:
            count[0] += 1
            own = {"trainer.save_checkpoint_path": str(place / f"run-{count[0]}")}
            names_run = observer is table.folder_name
            seen[key] = observer(settings(table.base(place) | ({} if names_run else own) | changes))
        return seen[key]

    return look


def settings(values: dict[str, Any]) -> Config:
    processes = 8 if values["worker.rollout.name"] == "vllm" else 1
    gpus = {"worker.rollout.gpus"} & set(values)
    launch = {"gpus_per_node": 1} if gpus else {"world_size": processes, "gpus_per_node": processes}
    if processes == 8 and not gpus:
        values = values | {"data.rollout_batch_size": 8, "worker.actor.global_batch_size": 8}
    return load_and_check(None, (), values, check_port=False, **launch)[0]


def test_every_working_option_has_a_row(place: Path) -> None:
    rows = [*table.probes(place), *table.SEEN_IN, *table.ONE_VALUE]
    assert sorted(set(WORKING) - set(rows)) == []
    assert sorted(set(rows) - set(WORKING)) == []
    assert len(rows) == len(set(rows))


def test_two_equal_runs_are_observed_alike(place: Path) -> None:
    """Else every comparison below would see a difference."""
    one, other = (
        table.run(settings(table.base(place) | {"trainer.save_checkpoint_path": str(place / name)}))
        for name in ("one", "two")
    )
    assert one == other


@pytest.mark.parametrize("key", WORKING)
def test_another_value_has_an_effect(key: str, place: Path, observe: Callable) -> None:
    if key in table.SEEN_IN:
        assert key.rpartition(".")[2] in (ROOT / table.SEEN_IN[key]).read_text()
        return
    if key in table.ONE_VALUE:
        with pytest.raises(ConfigError, match=f"{key}: .* is not a valid value"):
            settings(table.base(place) | {key: table.ONE_VALUE[key]})
        return
    probe = table.probes(place)[key]
    if probe.refused:
        with pytest.raises(ConfigError) as caught:
            settings(table.base(place) | probe.given | {key: probe.value})
        assert probe.refused in str(caught.value)
        return
    assert observe(probe.observe, probe.given | {key: probe.value}) != observe(probe.observe, probe.given)


@pytest.mark.parametrize("key", [key for key, option in schema_options().items() if option.status != WORKS])
def test_what_has_no_effect_is_refused_or_said(key: str, place: Path) -> None:
    option = schema_options()[key]
    kinds = {"bool": not option.default, "int": 7, "float": 0.25, "list[float]": [0.5, 0.5], "dict": {"a": 1}}
    values = table.base(place) | {key: kinds.get(option.kind, "other")}
    if option.status == NEUTRAL:
        notices = load_and_check(None, (), values)[1]
        assert [line for line in notices if line.startswith(f"{key} = ") and option.reason in line]
    else:
        assert option.status == PLANNED
        with pytest.raises(ConfigError, match="is not available in this version"):
            load_and_check(None, (), values)
