"""Tools reach the template, and calls the environment."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from test_tool_calls import TEMPLATES, tokenizer_of

from torchrl_llm.envs import ChatFormatter, GEMEnv, Response
from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.tool_calls import BadCall, ToolCall
from torchrl_llm.envs.tools import ToolError, tool_schemas
from torchrl_llm.testing.environments import Echo
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
