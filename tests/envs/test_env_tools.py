"""Tools reach the template, and calls the environment."""

from __future__ import annotations

import io
import json
import math
import pickle
from enum import Enum
from typing import ClassVar

import pytest
import torch
from test_tool_calls import TEMPLATES, tokenizer_of
from torchrl.envs.llm.transforms.tools import XMLBlockParser

from torchrl_llm import keys, turn_columns
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import CHATML, ChatFormatter, EnvironmentFault, GEMEnv, Response, Summarize, text_key
from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.text_env import TextStep
from torchrl_llm.envs.tool_arguments import check_arguments
from torchrl_llm.envs.tool_calls import BadCall, ToolCall
from torchrl_llm.envs.tool_env import ToolEnv, with_tools
from torchrl_llm.envs.tools import ToolError, tool_schemas
from torchrl_llm.metrics.rollouts import rollout_metrics
from torchrl_llm.objectives import GroupRelative
from torchrl_llm.runs import RunSettings
from torchrl_llm.runs.environments import make_environment, stock_env
from torchrl_llm.runs.identity import names_of_parts
from torchrl_llm.testing.environments import Echo, StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tokenizers import byte_tokenizer
from torchrl_llm.utils.options import ConfigError

SHOWN = "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}: {{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
TEMPLATE = SHOWN + TEMPLATES["json"]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def look(place: str) -> str:
    """Look somewhere.

    Args:
        place: where.
    """
    if place == "nowhere":
        raise ToolError("There is no such place.")
    return f"Nothing is in the {place}."


@pytest.fixture
def tokenizer():
    return tokenizer_of(TEMPLATE)


class Calculator(Echo):
    """An environment that declares a tool."""

    tools = (add,)

    def __init__(self):
        super().__init__(turns=3)
        self.said = []

    def step(self, action):
        self.said.append(action)
        return super().step(action)


class TestFormatter:
    def test_the_template_shows_them(self, tokenizer):
        formatter = ChatFormatter(tokenizer, tools=[add, look])
        start = tokenizer.decode(formatter.start("Go."))
        assert start == tokenizer.apply_chat_template(
            [{"role": "user", "content": "Go."}], tools=[add, look], tokenize=False, add_generation_prompt=True
        )
        assert '"description": "the first."' in start

    def test_a_response_has_its_calls(self, tokenizer):
        formatter = ChatFormatter(tokenizer, tools=[add])
        said = formatter.decode(
            [*tokenizer.encode(f"Well.\n{ADD}\n{ADD[:-15]}"), tokenizer.convert_tokens_to_ids("<|im_end|>")]
        )
        call, cut = said.calls
        assert call == ToolCall("add", {"a": 1, "b": 2})
        assert isinstance(cut, BadCall)
        assert said.startswith("Well.\n<tool_call>")

    def test_none_without_tools(self, tokenizer):
        assert ChatFormatter(tokenizer).decode(tokenizer.encode(ADD)).calls == ()

    def test_what_is_thought_is_no_call(self, tokenizer):
        formatter = ChatFormatter(tokenizer, tools=[add])
        said = formatter.decode(tokenizer.encode(f"<think>\n{ADD}\n</think>\n\n5"))
        assert (said.calls, said.text) == ((), "5")
        said = formatter.decode(tokenizer.encode(f"<think>\n{ADD}\n</think>\n\n{ADD}"))
        assert said.calls == (ToolCall("add", {"a": 1, "b": 2}),)

    def test_nor_in_a_thought_that_the_prompt_opens(self):
        opens = TEMPLATE.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
        formatter = ChatFormatter(tokenizer_of(opens), tools=[add], contexts="append")
        assert formatter.decode(formatter.tokenizer.encode(f"{ADD}\n")).calls == ()
        assert len(formatter.decode(formatter.tokenizer.encode(f"{ADD}\n</think>\n\n{ADD}")).calls) == 1

    def test_templates_that_write_no_calls_are_refused(self):
        for options in ({}, {"template": "raw"}):
            with pytest.raises(ConfigError, match="writes no calls"):
                ChatFormatter(byte_tokenizer(), tools=[add], **options)
        with pytest.raises(ConfigError, match="leave those out"):
            ChatFormatter(tokenizer_of(TEMPLATE), tools=[add], chat_template_kwargs={"tools": []})

    def test_the_end_of_a_call_ends_a_response(self):
        tokenizer = tokenizer_of(TEMPLATES["header"])
        formatter = ChatFormatter(tokenizer, tools=[add])
        end = tokenizer.convert_tokens_to_ids("<|call|>")
        assert end in formatter.end_of_turn_ids
        response = tokenizer.encode(' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>')
        assert formatter.decode(response).calls == (ToolCall("add", {"a": 1, "b": 2}),)
        behind = tokenizer.decode(formatter.feedback(response, "3"))
        assert behind == "<|start|>user<|message|>3<|end|><|start|>assistant"

    def test_it_can_be_pickled(self, tokenizer):
        formatter = pickle.loads(pickle.dumps(ChatFormatter(tokenizer, tools=[add])))
        assert formatter.decode(tokenizer.encode(ADD)).calls == (ToolCall("add", {"a": 1, "b": 2}),)


# Results are in one turn of the user, as in Qwen's template; and nowhere apart.
JOINED = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_call>\n{{ m.content }}\n</tool_call>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOP = "{% for message in messages %}"
NO_ROLE = CHATML.replace(LOOP, LOOP + "{% if message.role == 'tool' %}{{ raise_exception('no') }}{% endif %}")


class TestResults:
    @pytest.mark.parametrize("template", [CHATML, JOINED], ids=["apart", "joined"])
    @pytest.mark.parametrize("results", [("3", "4"), ("<tool_call>", "x\n", "</tool_call>5")])
    def test_each_is_a_message_of_its_own(self, template, results):
        tokenizer = tokenizer_of(template)
        formatter, response = ChatFormatter(tokenizer), tokenizer.encode("a<|im_end|>")
        ids = [*formatter.start("q"), *response, *formatter.feedback(response, results, role="tool")]
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        messages += [{"role": "tool", "content": result} for result in results]
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids) == expected
        if "<" not in "".join(results):
            assert ids == tokenizer.encode(expected)
        else:  # a look-alike is no token
            calls = tokenizer.convert_tokens_to_ids("<tool_call>")
            assert ids.count(calls) == (len(results) if template == JOINED else 0)

    def test_else_they_are_lines(self):
        tokenizer = tokenizer_of(NO_ROLE)
        behind = ChatFormatter(tokenizer).feedback(tokenizer.encode("a<|im_end|>"), ("3", "4"), role="tool")
        assert tokenizer.decode(behind) == "\n<|im_start|>user\n3\n4<|im_end|>\n<|im_start|>assistant\n"


class TestResponse:
    def test_copies_keep_calls(self):
        said = Response(ADD, calls=(ToolCall("add", {"a": [1, {"b": None}]}), BadCall("<tool_call>", "Cut.")))
        assert pickle.loads(pickle.dumps(said)).calls == said.calls
        file = io.BytesIO()
        torch.save(said, file)
        file.seek(0)
        assert torch.load(file, weights_only=True).calls == said.calls
        assert Response("5").calls == ()


class TestSchemas:
    def test_one_form(self):
        (schema,) = tool_schemas([look])
        assert tool_schemas([schema["function"]]) == tool_schemas([schema]) == (schema,)

    @pytest.mark.parametrize(
        "tools", [[5], ["add"], [{"parameters": {}}], [lambda a: a], [add, add], add, [Calculator]]
    )
    def test_what_is_none_is_refused(self, tools):
        with pytest.raises(ConfigError):
            tool_schemas(tools)


class TestGEMEnv:
    def env(self, tokenizer, env, **options):
        return GEMEnv(env, tokenizer=tokenizer, max_model_len=2000, max_output_tokens=200, **options)

    def test_an_environment_gets_the_calls_of_the_tools_that_it_declares(self, tokenizer):
        env = self.env(tokenizer, Calculator)
        assert [schema["function"]["name"] for schema in env.formatter.tools] == ["add"]
        env.rollout(1, ScriptedPolicy(lambda *_: ADD, tokenizer=tokenizer, max_output_tokens=200))
        (said,) = env.slots[0].envs[0].env.said
        assert said.calls == (ToolCall("add", {"a": 1, "b": 2}),)
        assert "add: {" in tokenizer.decode(env.slots.context(0))

    def test_given_tools_replace_them(self, tokenizer):
        env = self.env(tokenizer, Calculator, tools=[look])
        assert [schema["function"]["name"] for schema in env.formatter.tools] == ["look"]
        assert self.env(tokenizer, Calculator, tools=[]).formatter.tools == ()

    def test_a_mixture_has_one_list_of_tools(self, tokenizer):
        other = EnvSpec("other", Echo, tools=[look])
        with pytest.raises(ConfigError, match="different tools"):
            self.env(tokenizer, [Calculator, other])
        same = EnvSpec("same", Echo, tools=tool_schemas([add]))
        assert len(self.env(tokenizer, [Calculator, same]).formatter.tools) == 1
        assert len(self.env(tokenizer, [Calculator, other], tools=[add, look]).formatter.tools) == 2


def said(*calls):
    return Response("...", calls=calls)


def fail() -> str:
    """Fail."""
    raise OSError("broken")


class Notes:
    """Tools with a state."""

    def __init__(self):
        self.notes, self.closed = [], False

    def schemas(self):
        return [{"name": "note", "parameters": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}]

    def call(self, name, arguments):
        if not arguments["text"]:
            raise ToolError("A note has a text.")
        self.notes.append(arguments["text"])
        return f"{len(self.notes)} notes"


class TestToolEnv:
    def env(self, **options):
        env = ToolEnv(StopOrGo(), [add, look, fail, Notes()], **options)
        env.reset(seed=0)
        return env

    def test_calls_are_executed_in_order(self):
        env = self.env()
        text, reward, terminated, truncated, info = env.step(
            said(ToolCall("add", {"a": 1, "b": 2}), ToolCall("note", {"text": "x"}), ToolCall("look", {"place": "box"}))
        )
        assert text == "add: 3\nnote: 1 notes\nlook: Nothing is in the box."
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert (info["use_tool"], info["tool_faults"]) == (True, 0)
        assert env.step(said(ToolCall("note", {"text": "y"})))[0] == "2 notes"

    def test_a_response_without_calls_goes_to_the_environment(self):
        env = self.env()
        assert env.step("go on")[0] == "On we go."
        assert env.step(said())[4]["tool_faults"] == 0
        assert env.step("stop")[1:3] == (1.0, True)

    @pytest.mark.parametrize(
        ("call", "answer"),
        [
            (BadCall("<tool_call>", "This is not JSON."), "This is not JSON."),
            (ToolCall("sub", {}), "There is no tool 'sub'; the tools are add, look, fail, note."),
            (ToolCall("add", {"a": 1}), "The argument 'b' is missing."),
            (ToolCall("add", {"a": 1, "b": 2, "c": 3}), "There is no argument 'c'; expected a, b."),
            (ToolCall("add", {"a": 1, "b": "2"}), "The argument 'b' is \"2\"; expected integer."),
            (ToolCall("add", {"a": True, "b": 2}), "The argument 'a' is true; expected integer."),
            (ToolCall("look", {"place": "nowhere"}), "There is no such place."),
            (ToolCall("note", {"text": ""}), "A note has a text."),
        ],
    )
    def test_what_the_policy_does_wrong_is_told_and_counted(self, call, answer):
        text, _, terminated, _, info = self.env().step(said(call))
        assert text == f"Error: {answer}"
        assert (info["tool_faults"], terminated) == (1, False)

    def test_any_other_exception_is_the_environments(self):
        with pytest.raises(OSError, match="broken"):
            self.env().step(said(ToolCall("fail", {})))

    def test_calls_are_limited_in_each_episode(self):
        env, call = self.env(max_calls=2), ToolCall("add", {"a": 1, "b": 2})
        text, _, _, _, info = env.step(said(call, call, call))
        assert text == "add: 3\nadd: 3\nadd: Error: All 2 calls are used; answer without tools."
        assert info["tool_faults"] == 1
        env.reset(seed=1)
        assert env.step(said(call))[0] == "3"
        with pytest.raises(ConfigError, match="at least 1"):
            self.env(max_calls=0)

    def test_a_schema_alone_cannot_be_called(self):
        with pytest.raises(ConfigError, match="cannot be called"):
            ToolEnv(StopOrGo(), [{"name": "add", "parameters": {}}])

    def test_the_environments_own_extras_are_blank(self):
        env = ToolEnv(WithExtras(), [add])
        _, *_, info = env.step(said(ToolCall("add", {"a": 1, "b": 2})))
        assert (math.isnan(info["regret"]), info["state"]) == (True, "")
        assert env.extras == {"regret": float, "state": str, "tool_faults": float}

    @pytest.mark.parametrize(
        ("schema", "value", "fitting"),
        [
            ({"enum": ["c", "f"]}, "k", "c"),
            ({"const": 1}, 2, 1),
            ({"type": "array", "items": {"type": "integer"}}, [1, "x"], [1, 2]),
            ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 7, None),
            ({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, {}, {"a": "b"}),
            ({"type": ["string", "null"]}, 7, "x"),
        ],
    )
    def test_arguments_are_those_of_the_schema(self, schema, value, fitting):
        parameters = {"properties": {"x": schema}}
        with pytest.raises(ToolError, match="The argument 'x' is"):
            check_arguments(parameters, {"x": value})
        check_arguments(parameters, {"x": fitting})

    def test_other_arguments_where_the_schema_allows_them(self):
        check_arguments({}, {"x": 1})
        check_arguments({"properties": {}, "additionalProperties": True}, {"x": 1})
        with pytest.raises(ToolError, match="There is no argument 'x'; expected none"):
            check_arguments({"properties": {}}, {"x": 1})

    @pytest.mark.parametrize("result", [object(), [object()], (i for i in ())])
    def test_no_address_is_shown(self, result):
        """It would be another one when the episode is replayed."""

        def give():
            """Give something."""
            return result

        with pytest.raises(TypeError, match="expected text, or what JSON has"):
            ToolEnv(StopOrGo(), [give]).step(said(ToolCall("give", {})))

    def test_what_calls_cannot_give_is_refused(self):
        async def wait() -> str:
            """Wait."""
            return ""

        def by_place(a: int, /) -> int:
            """Take a.

            Args:
                a: any.
            """
            return a

        def by_member(unit: Unit) -> str:
            """Take a unit.

            Args:
                unit: any.
            """
            return unit.value

        by_member.__annotations__["unit"] = Unit
        for tool, reason in [(wait, "ordinary function"), (by_place, "by position"), (by_member, "as an Enum")]:
            with pytest.raises(ConfigError, match=reason):
                ToolEnv(StopOrGo(), [tool])
        with pytest.raises(ConfigError, match="a function without arguments"):
            with_tools(StopOrGo, add)

    def test_a_state_begins_with_the_episode(self):
        made = []

        def tools():
            made.append(Notes())
            return made[-1:]

        env = ToolEnv(StopOrGo(), tools)
        for _ in range(2):
            env.reset(seed=0)
            assert env.step(said(ToolCall("note", {"text": "x"})))[0] == "1 notes"
        assert len(made) == 3

        class Reset(Notes):
            def reset(self):
                self.notes.clear()

        kept = Reset()
        env = ToolEnv(StopOrGo(), lambda: [kept])
        for _ in range(2):
            env.reset(seed=0)
            assert env.step(said(ToolCall("note", {"text": "x"})))[0] == "1 notes"

    def test_they_may_be_methods_of_the_environment(self):
        made = []

        class Box(StopOrGo):
            closed = False

            def __init__(self):
                super().__init__()
                self.inside = 0
                made.append(self)

            def reset(self, seed=None):
                self.inside = seed
                return super().reset(seed=seed)

            def look(self) -> int:
                """Look into the box."""
                return self.inside

            def close(self):
                self.closed = True

        spec = with_tools(Box, lambda box: [box.look, Notes()])
        assert [each.closed for each in made] == [True]  # the one that was made for the schemas
        assert [schema["function"]["name"] for schema in spec.tools] == ["look", "note"]
        first, second = spec.make(), spec.make()
        for seed in (3, 4):
            first.reset(seed=seed)
            second.reset(seed=7)
            calls = said(ToolCall("look", {}), ToolCall("note", {"text": "x"}))
            assert first.step(calls)[0] == f"look: {seed}\nnote: 1 notes"
            assert second.step(said(ToolCall("look", {})))[0] == "7"

    def test_a_method_without_its_object_is_none(self):
        class Box:
            def look(self) -> int:
                """Look into the box."""
                return 1

        assert tool_schemas([Box().look])
        with pytest.raises(ConfigError, match="look' is a method without its object"):
            tool_schemas([Box.look])

    def test_the_schema_of_a_method_is_read_once(self, monkeypatch):
        class Counter:
            def once(self) -> int:
                """Count."""
                return 1

        (first,) = tool_schemas([Counter().once])
        monkeypatch.setattr("torchrl_llm.envs.tools.get_json_schema", None)
        first["function"]["name"] = "another"
        assert tool_schemas([Counter().once])[0]["function"]["name"] == "once"

    def test_they_are_thread_safe_if_all_are(self):
        class Safe(StopOrGo):
            thread_safe = True

        def safe() -> str:
            """Say it."""
            return "safe"

        assert not ToolEnv(Safe(), [safe]).thread_safe
        safe.thread_safe = True
        assert ToolEnv(Safe(), [safe]).thread_safe


class Unit(Enum):
    CELSIUS = "c"


class WithExtras(StopOrGo):
    extras: ClassVar = {"regret": float, "state": str}


class TestWithTools:
    def collected(self, tokenizer, answers, env=StopOrGo, tools=(add, look), **options):
        env = GEMEnv(
            with_tools(env, [*tools] if isinstance(tools, tuple) else tools, **options),
            tokenizer=tokenizer,
            max_model_len=4000,
            max_output_tokens=200,
        )
        policy = ScriptedPolicy(lambda _, turn, __: answers[turn], tokenizer=tokenizer, max_output_tokens=200)
        (rows,) = TurnCollector(env, policy, batch_size=1, total_batches=1)
        return env, rows

    def test_results_are_tool_messages_and_faults_are_metrics(self, tokenizer):
        _env, rows = self.collected(tokenizer, [f"{ADD}\n{ADD}", ADD.replace("add", "sub"), ADD[:-15], "stop"])
        text = tokenizer.decode(rows[keys.TOKENS][0][rows[keys.ATTENTION_MASK][0]])
        result = "<|im_start|>tool\nadd: 3<|im_end|>\n"
        assert f"</tool_call><|im_end|>\n{result}{result}<|im_start|>assistant\n" in text
        assert "<|im_start|>tool\nError: There is no tool 'sub'; the tools are add, look.<|im_end|>" in text
        assert "<|im_start|>tool\nError: This is not JSON" in text
        metrics = rollout_metrics(rows)
        assert (metrics["data/tool_calls"], metrics["data/tool_faults"]) == (4.0, 2.0)
        assert metrics["rollout/success"] == 1.0

    def test_what_was_called_is_a_column(self, tokenizer):
        """For the page of a run."""
        answers = [ADD + ADD.replace("1", '"\u00e9"'), ADD[:-15], "stop"]
        env = GEMEnv(with_tools(StopOrGo, [add]), tokenizer=tokenizer, max_model_len=4000, max_output_tokens=200)
        policy = ScriptedPolicy(lambda _, turn, __: answers[turn], tokenizer=tokenizer, max_output_tokens=200)
        collector = TurnCollector(env, policy, batch_size=1, total_batches=1)
        (rows,) = collector
        hashes = keys.turn_extras(rows)[turn_columns.TOOL_CALLS_JSON[-1]][0]
        first, second, third = (collector.texts[key] for key in hashes.tolist())
        calls = [{"name": "add", "arguments": {"a": a, "b": 2}} for a in (1, "\u00e9")]
        assert (json.loads(first), third) == (calls, "")
        (wrong,) = json.loads(second)
        assert wrong["text"].startswith("<tool_call>")
        assert wrong["reason"].startswith("This is not JSON")

    def test_an_environment_without_tools_has_no_such_metric(self, tokenizer):
        env = GEMEnv(StopOrGo, tokenizer=tokenizer, max_model_len=900)
        (rows,) = TurnCollector(
            env, ScriptedPolicy(lambda *_: "stop", tokenizer=tokenizer), batch_size=1, total_batches=1
        )
        assert not any("tool" in name for name in rollout_metrics(rows))

    def test_each_slot_has_its_own_tools(self):
        made = []

        def tools():
            made.append(Notes())
            return made[-1:]

        spec = with_tools(StopOrGo, tools)
        first, second = spec.make(), spec.make()
        assert len(made) == 3  # one for its schemas
        first.step(said(ToolCall("note", {"text": "x"})))
        assert [len(each.notes) for each in made] == [0, 1, 0]
        assert second.extras == spec.extras

    def test_tools_are_given_once(self):
        with pytest.raises(ConfigError, match="has tools already"):
            with_tools(with_tools(StopOrGo, [add]), [look])

    def test_extras_that_only_the_spec_declares_are_blank_too(self):
        class Regrets(StopOrGo):
            def step(self, action):
                *step, info = super().step(action)
                return (*step, {**info, "regret": 1.0})

        spec = with_tools(EnvSpec("e", Regrets, extras={"regret": float}), [add])
        *_, info = spec.make().step(said(ToolCall("add", {"a": 1, "b": 2})))
        assert math.isnan(info["regret"])

    def test_a_resumed_run_knows_the_environment_and_the_tools(self):
        names = [
            names_of_parts(env=with_tools(env, tools))["env"]
            for env, tools in [(StopOrGo, [add]), (StopOrGo, [look]), (EnvSpec("StopOrGo", Echo), [add])]
        ]
        assert len({*names}) == 3
        assert names[0] == "StopOrGo (torchrl_llm.testing.environments:StopOrGo with add)"

    @pytest.mark.parametrize("option", ["state", "potential"])
    def test_credit_by_a_state_that_turns_of_calls_do_not_have_is_refused(self, tokenizer, option):
        class Stated(StopOrGo):
            extras: ClassVar = {"state": str, "phi": float}

            def step(self, action):
                *step, _ = super().step(action)
                return (*step, {"state": "s", "phi": -5.0})

        _, rows = self.collected(tokenizer, [ADD, "stop"], env=Stated)
        assert text_key("") == turn_columns.EMPTY_TEXT
        unbiased = {"baseline": "leave_one_out", "scale": "none"}
        how = {"credit": "state", "state": "state"} if option == "state" else {"credit": "turn", "potential": "phi"}
        rows[keys.GROUP_ID] = rows[keys.EPISODE_ID]
        with pytest.raises(ValueError, match=f"{option} names '.*', which turns that call tools do not have"):
            GroupRelative(**unbiased, **how)(rows)

    def test_what_others_call_tool_results_is_theirs(self):
        for given in ("found 3 pages", {"x": "y"}, ["a", "b"], 5, ["a", None]):
            step = TextStep.read(("text", 0.0, False, False, {"use_tool": True, "tool_results": given, "suffix": "2."}))
            assert (step.message, step.results) == ("text\n2.", ())

    def test_gems_environments_keep_their_tasks(self, tokenizer):
        game = "game:GuessTheNumber-v0-easy"
        plain = GEMEnv(game, tokenizer=tokenizer, max_model_len=4000)
        tools = GEMEnv(with_tools(game, [add]), tokenizer=tokenizer, max_model_len=4000)
        assert (plain.reset()["task_id"] == tools.reset()["task_id"]).all()

    def test_a_tool_that_fails_is_a_fault_of_the_environment(self, tokenizer):
        call = ADD.replace("add", "fail").replace('"a": 1, "b": 2', "")
        with pytest.raises(EnvironmentFault, match="OSError: broken"):
            self.collected(tokenizer, [call], tools=(fail,))


class AddService:
    """Adds."""

    name = "add"
    schema_in: ClassVar = {"a": int, "b": int}
    schema_out: ClassVar = {"result": int}

    def __call__(self, a, b, **kwargs):
        return {"result": a + b}


class TestTorchRL:
    def test_its_services_are_tools(self):
        (schema,) = tool_schemas([AddService()])
        assert schema["function"]["parameters"]["properties"]["b"] == {"type": "integer"}
        env = ToolEnv(StopOrGo(), [AddService()])
        assert env.step(said(ToolCall("add", {"a": 1, "b": 2})))[0] == '{"result": 3}'
        assert env.step(said(ToolCall("add", {"a": 1})))[4]["tool_faults"] == 1

    def test_its_parsers_read_calls(self):
        written = '<tool name="add">{"a": 1, "b": 2}</tool> <tool name="add">[1]</tool>'
        env = GEMEnv(
            with_tools(StopOrGo, [AddService()], parser=XMLBlockParser()),
            tokenizer=byte_tokenizer(),
            max_model_len=900,
            max_output_tokens=100,
        )
        assert env.formatter.tools == ()
        env.rollout(1, ScriptedPolicy(lambda *_: written, tokenizer=byte_tokenizer(), max_output_tokens=100))
        assert env.slots[0].steps[0].message == 'add: {"result": 3}\nError: Its arguments are no object.'


class Notebook:
    """Tools with a state."""

    def __init__(self):
        self.said = []

    def schemas(self):
        return [{"name": "note", "parameters": {"properties": {"text": {"type": "string"}}}}]

    def call(self, name, arguments):
        self.said.append(arguments["text"])
        return " ".join(self.said)


class TestSetting:
    """Tools that the settings of a run name."""

    def env(self, tokenizer, given=Echo, **settings):
        tools = [f"{__name__}:look", f"{__name__}:Notebook"]
        settings = {"model_path": "tiny", "tools": tools, "num_envs": 2, "batch_size": 2, **settings}
        config = RunSettings.from_values(**settings, max_model_len=2048, max_output_tokens=128)
        return make_environment(config, tokenizer, stock_env(config, given), stream="train")

    def test_they_are_called_and_each_slot_has_its_own(self, tokenizer):
        call = '<tool_call>\n{{"name": "note", "arguments": {{"text": "{}"}}}}\n</tool_call>'
        policy = ScriptedPolicy(
            lambda episode, turn, context: call.format("ab"[episode]), tokenizer=tokenizer, max_output_tokens=128
        )
        env = self.env(tokenizer)
        prompt = env.rollout(2, policy)[:, 1]["tokens"]
        texts = [tokenizer.decode(ids[:n]) for ids, n in zip(prompt["prompt"], prompt["prompt_length"], strict=True)]
        for text, noted in zip(texts, "ab", strict=True):
            assert '"name": "look"' in text
            assert f"{noted}<|im_end|>\n<|im_start|>assistant\n" in text
        assert {schema["function"]["name"] for schema in env.formatter.tools} == {"look", "note"}

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"tools": [f"{__name__}:nothing"]}, r"tools names 'test_env_tools:nothing', which cannot be imported"),
            ({"tools": [f"{__name__}:ADD"]}, r"tool"),
            ({"collector": "self_play", "group_size": 2}, r"tools are of environments with one player"),
        ],
    )
    def test_others_are_refused(self, tokenizer, settings, said):
        with pytest.raises(ConfigError, match=said):
            self.env(tokenizer, **settings)


class Store(Echo):
    """An environment that is a set of tools itself."""

    def __init__(self):
        super().__init__(turns=3)
        self.seeds, self.open = [], True

    def reset(self, seed):
        assert self.open
        self.seeds.append(seed)
        return super().reset(seed)

    def schemas(self):
        return [{"name": "buy", "parameters": {"properties": {"what": {"type": "string"}}}}]

    def call(self, name, arguments):
        return f"Bought {arguments['what']}."

    def close(self):
        assert self.open
        self.open = False


def goto(place: tuple[int, int]) -> str:
    """Go.

    Args:
        place: x and y.
    """
    x, y = place
    return f"at {x + y}"


def total(prices: dict[str, int]) -> int:
    """Add up.

    Args:
        prices: by name.
    """
    return sum(prices.values())


def append(numbers: list[int]) -> list[int]:
    """Append a 5.

    Args:
        numbers: any.
    """
    numbers.append(5)
    return numbers


class Color(Enum):
    RED = "red"


def paint(colors: list[Color] | None = None) -> str:
    """Paint.

    Args:
        colors: any.
    """
    return str(colors)


def many(*numbers: int) -> str:
    """Take many.

    Args:
        numbers: any.
    """
    return str(numbers)


def colors() -> set[str]:
    """All colors."""
    return {"red", "green", "blue"}


class TestOtherTools:
    def said(self, tools, call, env=None):
        tools_env = ToolEnv(env or StopOrGo(), tools)
        tools_env.reset(seed=3)
        return tools_env.step(Response("", calls=(call,)))

    @pytest.mark.parametrize("place", [[1], ["a", 1], [1, 2, 3]])
    def test_a_tuple_has_its_length_and_kinds(self, place):
        text, *_, info = self.said([goto], ToolCall("goto", {"place": place}))
        assert text.startswith("Error: The argument 'place' is ")
        assert "prefixItems" in text
        assert info["tool_faults"] == 1
        assert self.said([goto], ToolCall("goto", {"place": [1, 2]}))[0] == "at 3"

    def test_the_values_of_an_object_have_their_kind(self):
        text = self.said([total], ToolCall("total", {"prices": {"bolt": "7"}}))[0]
        assert text.startswith("Error: The argument 'prices' is ")
        assert self.said([total], ToolCall("total", {"prices": {"bolt": 7}}))[0] == "7"

    def test_a_call_is_not_what_its_tool_makes_of_it(self):
        call = ToolCall("append", {"numbers": [1]})
        assert self.said([append], call)[0] == "[1, 5]"
        assert call.arguments == {"numbers": [1]}

    def test_a_set_is_shown_in_one_order(self):
        assert self.said([colors], ToolCall("colors", {}))[0] == '["blue", "green", "red"]'

    @pytest.mark.parametrize(("tool", "why"), [(paint, "as an Enum"), (many, "any number of arguments")])
    def test_what_calls_cannot_give_is_refused(self, tool, why):
        with pytest.raises(ConfigError, match=why):
            tool_schemas([tool])

    @pytest.mark.parametrize("more", [[], [add]])
    def test_an_environment_that_is_a_tool_is_reset_once_and_closed_by_its_owner(self, more):
        spec = with_tools(Store, lambda env: [env, *more])
        env = spec.make()
        for seed in (1, 2):
            env.reset(seed=seed)
            assert env.step(Response("", calls=(ToolCall("buy", {"what": "milk"}),)))[0] == "Bought milk."
        assert env.env.seeds == [1, 2]
        assert env.env.open

    def test_a_method_is_as_safe_as_its_environment(self):
        class Safe(Store):
            thread_safe = True

            def ask(self) -> str:
                """Ask."""
                return "Yes."

        assert ToolEnv(Safe(), lambda env: [env.ask]).thread_safe
        assert not ToolEnv(Safe(), lambda env: [env.ask, add]).thread_safe

    def test_an_extra_may_be_called_success(self, tokenizer):
        class Told(Echo):
            extras: ClassVar = {"success": float}

            def step(self, action):
                return *super().step(action)[:4], {"success": 1.0}

        policy = ScriptedPolicy(
            lambda episode, turn, context: [ADD, "Hi."][turn % 2], tokenizer=tokenizer, max_output_tokens=128
        )
        env = GEMEnv(with_tools(Told, [add]), tokenizer=tokenizer, max_output_tokens=128, max_model_len=2048)
        turns = env.rollout(3, policy)
        assert turns["next", "extra", "success"].flatten().isnan().tolist() == [True, False, True]
        assert env.lockstep.faults.counts == {}

    def test_names_that_tools_write_are_refused(self):
        class Results(Echo):
            extras: ClassVar = {"tool_results": str}

        with pytest.raises(ConfigError, match=r"the extra 'tool_results', which tools write"):
            ToolEnv(Results(), [add])

    def test_the_calls_in_a_summary_are_none(self, tokenizer):
        policy = ScriptedPolicy(lambda episode, turn, context: ADD, tokenizer=tokenizer, max_output_tokens=128)
        rule = Summarize("Sum up.", at_tokens=300)
        env = GEMEnv(
            with_tools(Echo, [add]),
            tokenizer=tokenizer,
            max_output_tokens=128,
            max_model_len=2048,
            context_rule=rule,
        )
        turns = env.rollout(6, policy)
        counted, segment = (x.flatten().tolist() for x in (turns["next", "extra", "tool_calls"], turns["segment"]))
        assert max(segment) > 0
        summaries = [i for i in range(5) if segment[i + 1] > segment[i]]
        assert [counted[i] for i in summaries] == [0.0] * len(summaries)
        # of the last turn nothing shows whether it is one
        assert [n for i, n in enumerate(counted[:5]) if i not in summaries] == [1.0] * (5 - len(summaries))
