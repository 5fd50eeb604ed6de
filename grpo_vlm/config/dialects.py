"""Which project's options a configuration is written in, and their translation into ours.

verl: some source has the section `actor_rollout_ref`. Anything else is read as EasyR1's, whose keys are ours.
"""

from collections.abc import Sequence

from grpo_vlm.config import dialect_easyr1, dialect_verl
from grpo_vlm.config.faults import Fault
from grpo_vlm.config.layers import Layer


def translated(layers: Sequence[Layer]) -> tuple[list[Layer], list[str], list[Fault]]:
    """The layers under our keys, a notice for everything that was translated or left out, and what is wrong."""
    if dialect_verl.is_verl(layers):
        return dialect_verl.translate(layers)
    done, notices = dialect_easyr1.translate(layers)
    return done, notices, []
