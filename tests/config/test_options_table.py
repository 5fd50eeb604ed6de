"""The table of docs/options.md names every option in four projects' terms."""

from dataclasses import fields

import pytest
from trl import GRPOConfig

from grpo_vlm.config.dialect_verl_keys import KEYS
from grpo_vlm.config.help import default_text, format_markdown
from grpo_vlm.config.keys import schema_options
from grpo_vlm.config.names import EASYR1_KEYS, TRL
from tests.config.test_config_schema import EASYR1


def cells() -> dict[str, list[str]]:
    """Key -> the cells of its row in the sections' tables."""
    lines = format_markdown().partition("## data\n")[2].splitlines()
    rows = [line.replace("\\|", "/").strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): row for row in rows}


ROWS = cells()


@pytest.mark.parametrize("key", EASYR1)
def test_every_key_of_easyr1_is_in_the_table(key: str) -> None:
    assert ROWS[key][3] == "`same`"


def test_every_option_has_a_row_with_its_default_and_status() -> None:
    assert list(ROWS) == list(schema_options())
    for key, option in schema_options().items():
        assert len(ROWS[key]) == 8
        assert (ROWS[key][1], ROWS[key][6]) == (f"`{default_text(option)}`", option.status)


def test_the_names_exist_where_they_are_said_to() -> None:
    assert set(EASYR1) == EASYR1_KEYS
    arguments = {field.name for field in fields(GRPOConfig)}
    assert {name for names in TRL.values() for name in names.split(", ")} <= arguments
    assert set(TRL) <= set(schema_options())
    for key in schema_options():
        names = [name.strip("`") for name in ROWS[key][4].split("<br>")]
        assert names == ["-"] or all(name.removesuffix("*") in KEYS for name in names)


def test_names_that_are_known() -> None:
    assert ROWS["worker.actor.global_batch_size"][3:6] == [
        "`same`",
        "`actor_rollout_ref.actor.ppo_mini_batch_size`",
        "-",
    ]
    assert ROWS["worker.rollout.min_p"][3:6] == ["-", "-", "`min_p`"]
    assert ROWS["algorithm.kl_coef"][5] == "`beta`"
    assert "`algorithm.kl_ctrl.kl_coef`" in ROWS["algorithm.kl_coef"][4].split("<br>")
