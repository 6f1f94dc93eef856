"""Settings in sections, apart from what they are."""

import inspect
from dataclasses import field, make_dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_llm.runs import AsyncRollouts, HFSettings, ModelSettings, RayRollouts, RunSettings, TurnRollouts
from torchrl_llm.utils.options import Checked, ConfigError, Count, Idle, IdleError
from torchrl_llm.utils.sections import (
    Alternative,
    Sectioned,
    in_sections,
    meanings_of,
    section_of,
    sections_of,
    settings_of,
)


def dataclass_of(name, *fields, base=Checked, **namespace):
    return make_dataclass(name, fields, bases=(base,), kw_only=True, namespace=namespace)


Optim = dataclass_of("Optim", ("lr", float, 0.1), ("decay", float, 0.0))
Loop = dataclass_of("Loop", ("epochs", Count, 1), ("decay_steps", int, 5))
RULE = Idle(("decay_steps",), {"decay": (0,)}, "set decay")
PARTS = (("optim", Optim, field(default_factory=Optim)), ("loop", Loop, field(default_factory=Loop)))
Run = dataclass_of("Run", ("seed", int, 0), *PARTS, base=Sectioned, idle=(RULE,))


@given(st.fixed_dictionaries({}, optional={"seed": st.integers(), "lr": st.floats(0, 1), "epochs": st.integers(1, 9)}))
def test_values_and_sections_are_two_forms_of_the_same(values):
    run = Run.from_values(**values)
    defaults = {"seed": 0, "lr": 0.1, "decay": 0.0, "epochs": 1, "decay_steps": 5}
    assert run.values() == defaults | values
    assert Run.from_values(**run.values()) == run == Run().replace(**values)
    nested = in_sections(Run, run.values())
    assert nested["optim"] == {"lr": run.optim.lr, "decay": 0.0}
    assert Run(seed=nested["seed"], optim=Optim(**nested["optim"]), loop=Loop(**nested["loop"])) == run


def test_a_replaced_value_leaves_the_first_as_it_was():
    run = Run()
    assert run.replace(lr=0.5).optim.lr == 0.5
    assert run.optim.lr == 0.1


def test_whole_sections_may_be_given_among_values():
    run = Run(seed=3, optim=Optim(lr=0.5, decay=0.5))
    assert run.replace(optim=Optim(lr=0.2)) == Run(seed=3, optim=Optim(lr=0.2))
    assert run.replace(optim=Optim(lr=0.2), decay=0.3).optim == Optim(lr=0.2, decay=0.3)
    assert Run.from_values(optim=Optim(lr=0.2), epochs=2) == Run(optim=Optim(lr=0.2), loop=Loop(epochs=2))
    with pytest.raises(ConfigError, match=r"Run\.optim is \{'lr': 0\.2\}; expected Optim\."):
        run.replace(optim={"lr": 0.2})


def test_a_rule_is_about_settings_of_all_sections():
    Run(optim=Optim(decay=0.1), loop=Loop(decay_steps=7))
    for make in (lambda: Run(loop=Loop(decay_steps=7)), lambda: Run.from_values(decay_steps=7)):
        with pytest.raises(
            IdleError, match=r"^decay_steps=7 does nothing with decay=0\.0: leave it out, or set decay\.$"
        ) as raised:
            make()
        assert (raised.value.names, raised.value.under) == (("decay_steps",), ("decay",))


def test_one_name_for_two_settings_is_refused():
    other = dataclass_of("Other", ("lr", float, 0.0))
    twice = dataclass_of("Twice", PARTS[0], ("other", other, field(default_factory=other)), base=Sectioned)
    with pytest.raises(TypeError, match="Twice has lr twice: a setting has one name in all sections"):
        twice()


class TestErrors:
    def test_a_setting_beside_the_sections_is_told_where_it_stands(self):
        with pytest.raises(
            TypeError,
            match=r"RunSettings has no option 'batch_size'\. It stands in the section rollouts: RunSettings\(rollouts=TurnRollouts\(batch_size=\.\.\.\)\)\.$",
        ):
            RunSettings(batch_size=8)

    def test_a_wrong_name_is_told_the_nearest_and_its_section(self):
        said = r"no option 'batch_sise'\. Did you mean 'batch_size'\? It stands in the section rollouts\.$"
        for make in (RunSettings, RunSettings.from_values):
            with pytest.raises(TypeError, match=said):
                make(batch_sise=8)
        with pytest.raises(TypeError, match=r"Did you mean 'rollouts'\?$"):
            RunSettings(rollout=TurnRollouts())

    @pytest.mark.parametrize("wrong", [{"model_path": "tiny"}, None, TurnRollouts()])
    def test_what_is_no_section_is_refused(self, wrong):
        with pytest.raises(ConfigError, match=r"RunSettings\.model is .*; expected ModelSettings\.$"):
            RunSettings(model=wrong)

    def test_a_section_checks_its_own(self):
        with pytest.raises(ConfigError, match=r"TurnRollouts\.batch_size is 0; expected an integer, at least 1"):
            RunSettings(rollouts=TurnRollouts(batch_size=0))
        with pytest.raises(TypeError, match="ModelSettings has no option 'model'"):
            RunSettings(model=ModelSettings(model="tiny"))


def test_every_setting_of_a_run_has_a_section_and_a_meaning():
    names = {name for kinds in sections_of(RunSettings).values() for kind in kinds for name in settings_of(kind)}
    assert settings_of(RunSettings).keys() == {"algo", "policy", "collector"} | names == meanings_of(RunSettings).keys()
    assert {section_of(RunSettings, name) for name in names} == sections_of(RunSettings).keys()
    assert (section_of(RunSettings, "algo"), section_of(RunSettings, "nothing")) == (None, None)


Step = dataclass_of("Step", base=Alternative, named_by="method")


def option_class(name, *fields, base=Step, **namespace):
    return dataclass_of(name, *fields, base=base, **namespace)


Adam = option_class("Adam", ("lr", float, 0.1), ("beta", float, 0.9))
SGD = option_class("SGD", ("lr", float, 1.0), ("momentum", float, 0.0), harmless={"beta": 0})
STEP = ("step", Adam | SGD, field(default_factory=Adam))
METHOD = property(lambda run: type(run.step).__name__, doc="How a step is taken.")
Fit = dataclass_of("Fit", ("seed", int, 0), STEP, base=Sectioned, method=METHOD)


class TestAlternatives:
    """A section that has one of several classes."""

    def test_the_class_is_named_by_a_setting(self):
        assert Fit().values() == {"seed": 0, "method": "Adam", "lr": 0.1, "beta": 0.9}
        fit = Fit.from_values(method="SGD", momentum=0.5)
        assert fit == Fit(step=SGD(momentum=0.5)) == Fit.from_values(**fit.values())
        assert fit.values() == {"seed": 0, "method": "SGD", "lr": 1.0, "momentum": 0.5}
        assert in_sections(Fit, fit.values()) == {"method": "SGD", "seed": 0, "step": {"lr": 1.0, "momentum": 0.5}}

    def test_another_class_begins_with_its_defaults(self):
        fit = Fit(seed=3, step=Adam(lr=0.5, beta=0.5))
        assert fit.replace(method="SGD") == fit.replace(step=SGD()) == Fit(seed=3, step=SGD())
        assert fit.replace(method="SGD", lr=0.2) == Fit(seed=3, step=SGD(lr=0.2))
        assert fit.replace(method="Adam", lr=0.2).step == Adam(lr=0.2, beta=0.5)

    def test_another_class_keeps_what_both_declare_alike(self):
        config = RunSettings.from_values(batch_size=64, group_size=8, tree_branches=3, step_timeout=5.0)
        others = config.replace(collector="async")
        assert others.rollouts == AsyncRollouts(batch_size=64, group_size=8, step_timeout=5.0)
        assert config.replace(rollouts=AsyncRollouts()).rollouts == AsyncRollouts()
        assert others.replace(collector="turn", tree_branches=3) == config
        ray = RunSettings(rollouts=AsyncRollouts(max_staleness=2)).replace(collector="ray")
        assert ray.rollouts == RayRollouts(max_staleness=2)
        # A group is another thing there.
        assert config.replace(collector="self_play").rollouts.group_size == 2

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"engine": HFSettings(), "policy": "vllm"}, "policy is 'vllm', and engine is a HFSettings"),
            ({"policy": "vllm", "engine": HFSettings()}, "policy is 'vllm', and engine is a HFSettings"),
            ({"rollouts": AsyncRollouts(max_staleness=1), "collector": "ray"}, "collector is 'ray', and rollouts is a AsyncRollouts"),
            ({"rollouts": AsyncRollouts(), "collector": "turn"}, "collector is 'turn', and rollouts is a AsyncRollouts"),
        ],
    )  # fmt: skip
    def test_a_section_and_a_name_that_contradict_each_other(self, given, said):
        for make in (RunSettings.from_values, RunSettings().replace):
            with pytest.raises(ConfigError, match=said):
                make(**given)

    def test_settings_are_those_of_all_classes_and_have_a_default_where_these_agree(self):
        assert [*settings_of(Fit)] == ["method", "seed", "lr", "beta", "momentum"]
        assert settings_of(Fit)["lr"].default is inspect.Parameter.empty
        assert (settings_of(Fit)["method"].default, settings_of(Fit)["beta"].default) == ("Adam", 0.9)
        assert [section_of(Fit, name) for name in ("method", "momentum")] == [None, "step"]
        assert {name: option.default for name, option in Fit(step=SGD()).options().items()}.items() >= {
            ("lr", 1.0),
            ("momentum", 0.0),
        }

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            (
                {"momentum": 0.1},
                r'momentum=0\.1 does nothing with method=\'Adam\': leave it out, or set method to "SGD"\.',
            ),
            ({"method": "SGD", "beta": 0.9}, r"beta=0\.9 does nothing with method='SGD'"),
            ({"method": "RMSprop"}, r"method is 'RMSprop'; expected one of 'Adam', 'SGD'\."),
        ],
    )
    def test_settings_of_another_class_are_refused(self, values, said):
        with pytest.raises(ConfigError, match=said):
            Fit.from_values(**values)

    def test_what_asks_for_what_happens_anyway_is_left_out(self):
        assert Fit.from_values(method="SGD", beta=0).step == SGD()

    def test_the_name_of_the_class_beside_the_sections_is_told_what_to_write(self):
        said = r"no option 'method'\. It is the class of a section: give step one of Adam or SGD\.$"
        with pytest.raises(TypeError, match=said):
            Fit(method="SGD")
        with pytest.raises(ConfigError, match=r"method is 'Adam', and step is a SGD: leave one of them out\."):
            Fit.from_values(method="Adam", step=SGD())
        with pytest.raises(TypeError, match=r"It stands in the section step: Fit\(step=SGD\(lr=\.\.\.\)\)\.$"):
            Fit(step=SGD(), lr=0.5)
        with pytest.raises(TypeError, match=r"It stands in the section step: Fit\(step=SGD\(momentum=\.\.\.\)\)\.$"):
            Fit(momentum=0.5)

    def test_a_subclass_is_refused(self):
        mine = option_class("Mine", base=Adam)
        with pytest.raises(ConfigError, match=r"step is a subclass, Mine; expected Adam or SGD itself\."):
            Fit(step=mine())
        with pytest.raises(ConfigError, match=r"Fit\.step is 'SGD'; expected Adam or SGD\."):
            Fit(step="SGD")
