"""Options check themselves by their annotations, or say that they cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from torchrl_llm.modules import SamplingConfig
from torchrl_llm.runs import RunSettings
from torchrl_llm.utils.options import Checked, ConfigError, Count, options_of

if TYPE_CHECKING:
    from decimal import Decimal


class Unread(Checked):
    def __init__(self, *, width: Count = 1, price: Decimal | None = None): ...


class Foreign:
    def __init__(self, *, price: Decimal | None = None): ...


class Derived(Checked, Foreign):
    def __init__(self, *, width: Count = 1, **options):
        super().__init__(**options)


def test_an_annotation_that_cannot_be_read_switches_no_check_off():
    with pytest.raises(TypeError, match=r"Unread cannot be read \(name 'Decimal' is not defined\).*at run time"):
        Unread(width=0)


def test_the_options_of_a_class_of_others_are_known_though_their_annotations_are_not():
    assert [*options_of(Derived)] == ["width", "price"]
    assert Derived(price="any") is not None
    with pytest.raises(ConfigError, match=r"Derived\.width is 0"):
        Derived(width=0)


@pytest.mark.parametrize("cls", [SamplingConfig, RunSettings])
def test_what_is_printed_cuts_long_values_alone(cls):
    options = {"temperature": 0.5, "max_output_tokens": 32}
    make = getattr(cls, "from_values", cls)
    short, long = (repr(make(**options, stop_ids=ids)) for ids in ((1, 2), tuple(range(100_000))))
    assert short.startswith(f"{cls.__name__}(")
    assert "temperature=0.5" in short
    assert "stop_ids=(1, 2)" in short
    beginning, end = long.split(" ... ")
    assert "stop_ids=(0, 1, 2, " in beginning
    assert "99998, 99999)" in end
    assert len(long) < len(short) + 205
