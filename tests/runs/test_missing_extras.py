"""Extras that an estimator reads and the environment does not declare are refused when a run is
built, not after its first batch."""

import pytest
from small_runs import small_config

from torchrl_llm import keys
from torchrl_llm.objectives import GroupRelative
from torchrl_llm.runs import build_run
from torchrl_llm.runs.wrong_settings import missing_columns
from torchrl_llm.utils.options import ConfigError

STATE = {"credit": "state", "baseline": "leave_one_out", "scale": "none"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (STATE | {"state": "stat"}, "state='stat' is not an extra that the environment declares as a str"),
        (STATE | {"state": "regret"}, "state='regret' is not an extra that the environment declares as a str"),
        ({"credit": "turn", "potential": "state"}, "potential='state' is not an extra that the environment declares as a float"),
        ({"components": {"luck": 1.0}, "whiten": True}, "components='luck' is not an extra that the environment declares as a float"),
    ],
)  # fmt: skip
def test_are_refused_at_the_start(tmp_path, settings, said):
    with pytest.raises(ConfigError, match=said) as caught:
        build_run(small_config(tmp_path, "GRPO", env_name="world:stairs", **settings))
    assert "it declares regret (float), state (str)" in str(caught.value)


def test_states_of_a_subclass_read_what_they_like():
    class Tens(GroupRelative):
        def states(self, tensordict):
            return keys.turn_extras(tensordict)["board"] // 10

    assert [*missing_columns(Tens(state="tens", **STATE), [keys.TurnColumn(keys.extra("board"), str)])] == []


@pytest.mark.parametrize("state", ["state", "prefix", "observation"])
def test_those_that_are_there_are_not(tmp_path, state):
    build_run(small_config(tmp_path, "GRPO", env_name="world:stairs", state=state, **STATE)).close()
