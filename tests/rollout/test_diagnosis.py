"""What the logs of failed starts say. The lines are vLLM 0.26's, shortened. (Real ones: test_server.py.)"""

import re

import pytest

from grpo_vlm.rollout.diagnosis import first_error, likely_remedy, refused_argument

API = "(APIServer pid=14018) "
LIMIT = (
    API
    + "WARNING 12-01 03:40:20 [system_utils.py:299] Found ulimit of 1024 and failed to automatically increase with "
    "error current limit exceeds maximum limit. This can cause fd limit errors like "
    "`OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n\n"
)
HINT = API + "INFO 12-01 03:40:21 [worker.py:1] ValueError: out of memory would end here\n"
FIELD = f"""{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig
{API}max_num_seqs
{API}  Input should be greater than or equal to 1 [type=greater_than_equal, input_value=0, input_type=int]
{API}    For further information visit https://errors.pydantic.dev/2.14/v/greater_than_equal
"""
VALUE = f"""{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
{API}  Value error, a (100) is greater than b. [type=value_error, input_value=ArgsKwargs((), {{}}), input_type=A]
{API}    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
ENGINE = f"""(EngineCore pid=5) ERROR 12-01 03:40:30 [core.py:1329] Traceback (most recent call last):
(EngineCore pid=5) ERROR 12-01 03:40:30 [core.py:1329]     raise ValueError("No available memory: {{x}}")
(EngineCore pid=5) ERROR 12-01 03:40:30 [core.py:1329] ValueError: No available memory for the cache blocks.
{API}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
USAGE = """usage: api_server.py [-h] [--host HOST] [--max-num-seqs MAX_NUM_SEQS]
                     [--kv-cache-dtype {auto,fp8}]
api_server.py: error: """
SECTION = "worker.rollout.engine_kwargs"


@pytest.mark.parametrize(
    ("log", "given", "error", "remedy"),
    [
        (LIMIT, {}, None, None),
        (HINT, {}, None, None),
        (
            LIMIT + FIELD,
            {"max_num_seqs": 0},
            "SchedulerConfig: max_num_seqs: Input should",
            f"what .* {SECTION}.max_num",
        ),
        (LIMIT + VALUE, {"a": 1, "b": 2}, "VllmConfig: a (100) is greater than b.", f"{SECTION}.a, {SECTION}.b$"),
        (VALUE, {}, "VllmConfig: a (100)", None),
        (LIMIT + HINT + ENGINE, {"a": 1}, "ValueError: No available memory for", "raise gpu_memory_utilization"),
    ],
)
def test_first_error_and_remedy(log, given, error, remedy):
    found, advice = first_error(log), likely_remedy(log, given)
    assert found is None if error is None else found.startswith(error)
    assert "For further" not in (found or "") and "[type=" not in (found or "")
    assert advice is None if remedy is None else re.search(remedy, advice)


@pytest.mark.parametrize(
    ("error", "given", "words"),
    [
        (
            "unrecognized arguments: --fancy x --no-max-num-seq",
            {"fancy": "x", "max_num_seq": False},
            "fancy; .*max_num_",
        ),
        ("unrecognized arguments: --no-fancy", {"no-fancy": True}, f"{SECTION}.no-fancy. Correct"),
        ("unrecognized arguments: --ours", {"fancy": 1}, None),
        (
            "argument --max-num-seqs: invalid int value: 'many'",
            {"max-num-seqs": "many"},
            "max-num-seqs: is 'many'; vLLM",
        ),
        ("argument --kv-cache-dtype: invalid choice: 'x'", {"max_num_seqs": 1}, None),
    ],
)
def test_refused_arguments_are_named_by_their_keys(error, given, words):
    found = refused_argument(LIMIT + USAGE + error + "\n", given)
    assert found is None if words is None else re.search(words, found)
