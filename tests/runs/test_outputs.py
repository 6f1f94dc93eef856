"""Reports show what models and environments said, and nothing of it acts."""

from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt

from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import CHATML, GEMEnv, PromptDatasetEnv
from torchrl_llm.runs.outputs import episodes_text, fenced, with_final
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tokenizers import byte_tokenizer

IMG = "<img src=x onerror=alert(1)>"
PAYLOADS = [
    f"```\n{IMG}",
    f"\n```\n{IMG}\n```text",
    f"`````\n{IMG}\n``` ````",
    f"   ```\n{IMG}",
    f"~~~\n{IMG}",
    f"\r```\r{IMG}\r",
    f"# heading\n\n{IMG}\n\n[link](javascript:alert(1))",
    f"</code></pre>{IMG}",
    "`",
]


def rendered(markdown: str) -> str:
    return MarkdownIt("commonmark").render(markdown)


class TestFence:
    @pytest.mark.parametrize("payload", PAYLOADS)
    def test_everything_stays_text(self, payload):
        html = rendered(f"# Title\n\n{fenced(payload)}\n\nbehind")
        assert re.fullmatch(r"<h1>Title</h1>\n<pre><code[^<>]*>[^<>]*</code></pre>\n<p>behind</p>\n", html), html

    @pytest.mark.parametrize("payload", PAYLOADS)
    def test_of_conversations(self, tokenizer, payload):
        """Said by the policy, and asked by the environment."""
        env = PromptDatasetEnv(
            [{"question": payload, "answer": ""}, {"question": "?", "answer": ""}],
            lambda *_: 0.0,
            tokenizer=tokenizer,
            max_model_len=256,
            max_output_tokens=64,
        )
        policy = ScriptedPolicy(lambda *_: payload, tokenizer=tokenizer, max_output_tokens=64)
        rows = TurnCollector(env, policy, batch_size=2).rollout()
        html = rendered(episodes_text(rows, tokenizer))
        assert len(re.findall(r"<h3>episode \d", html)) == 2
        assert set(re.findall(r"</?[a-z0-9]+", html)) == {"<h3", "</h3", "<pre", "</pre", "<code", "</code"}, html


class TestConversations:
    @pytest.mark.parametrize("opening", ["", "<think>\n\n</think>\n\n"], ids=["plain", "thinking"])
    def test_read_as_they_were_played(self, opening):
        """Numbered, and over where the environment has the last word: no turn is left open."""
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = CHATML.replace("assistant\n", "assistant\n{{ opening }}")
        env = GEMEnv(
            Counting,
            num_envs=2,
            group_size=2,
            tokenizer=tokenizer,
            contexts="append",
            chat_template_kwargs={"opening": opening},
            max_model_len=512,
            max_output_tokens=64,
        )
        policy = ScriptedPolicy(lambda *_: "Yes.", tokenizer=tokenizer, max_output_tokens=64)
        rows = TurnCollector(env, policy, batch_size=4).rollout()
        text = episodes_text(rows, tokenizer, chat_template_kwargs={"opening": opening})
        heads = re.findall("^### .*", text, re.MULTILINE)
        assert heads == [
            f"### episode {i}, task {(i + 1) // 2}: won after 2 turns, rewards 0.1, 1" for i in range(1, 5)
        ]
        assert text.count(f"<|im_start|>assistant\n{opening}Yes.") == text.count("<|im_start|>assistant") == 2 * 4
        assert len(re.findall(r"user\nRight\.<\|im_end\|>\n+```$", text, re.MULTILINE)) == 4

    @pytest.mark.parametrize("template", ["chat", "raw"])
    def test_a_template_that_takes_no_text_ends_no_report(self, template):
        """It takes lists of parts, or the run does without it."""
        tokenizer = byte_tokenizer()
        part = "{{ message['content'][0]['text'] }}" if template == "chat" else "{{ raise_exception('No.') }}"
        tokenizer.chat_template = CHATML.replace("{{ message['content'] }}", part)
        env = GEMEnv(Counting, tokenizer=tokenizer, template=template, max_output_tokens=64)
        policy = ScriptedPolicy(lambda *_: "Yes.", tokenizer=tokenizer, max_output_tokens=64)
        text = episodes_text(TurnCollector(env, policy, batch_size=1).rollout(), tokenizer)
        assert text.count("Yes.") == 2


class Counting:
    """Won in the second turn."""

    def hidden_state(self):
        return self.number

    def reset(self, seed=None):
        self.turn, self.number = 0, seed
        return "Ready?", {}

    def step(self, action):
        self.turn += 1
        return "Right.", 1.0 if self.turn == 2 else 0.1, self.turn == 2, False, {}


class TestCurve:
    def test_ends_with_the_evaluation_after(self):
        evaluated = {"rollout/steps": 4.0, "evaluation/success": 0.3}
        last, after = {"rollout/steps": 7.0}, {"evaluation/success": 0.5}
        assert with_final([evaluated, last], after) == [evaluated, last | after]
        # of other tasks, and drawn already
        assert with_final([last, evaluated], after) == [last, evaluated]
        assert with_final([evaluated, last], {}) == [evaluated, last]
        assert with_final([], after) == []
