"""Options of losses and estimators: each has its docstring below its field, and no second one."""

import re
from dataclasses import fields, is_dataclass

import pytest

from torchrl_llm import objectives
from torchrl_llm.utils.options import Checked, meanings

CLASSES = [
    each
    for each in map(objectives.__dict__.get, objectives.__all__)
    if isinstance(each, type) and issubclass(each, Checked) and is_dataclass(each)
]


def test_there_are_losses_and_estimators():
    assert {"TurnPolicyLoss", "LLMPPOLoss", "GroupRelative", "TurnGAE"} <= {each.__name__ for each in CLASSES}


@pytest.mark.parametrize("kind", CLASSES)
def test_an_option_is_documented_below_its_field_alone(kind):
    options = {option.name for option in fields(kind) if option.init}
    assert not options - meanings(kind).keys()
    listed = re.findall(r"^        (\w[\w, ]*):", kind.__doc__, re.MULTILINE)
    assert not options & {name for line in listed for name in line.split(", ")}
