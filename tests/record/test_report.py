"""Reports show what models and environments said, and nothing of it acts."""

from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt

from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import PromptDatasetEnv
from torchrl_llm.record.report import conversations_text, fenced, plot_learning_curve
from torchrl_llm.testing.policies import ScriptedPolicy

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
        html = rendered(conversations_text(rows, tokenizer))
        assert len(re.findall(r"<h3>episode \d", html)) == 2
        assert set(re.findall(r"</?[a-z0-9]+", html)) == {"<h3", "</h3", "<pre", "</pre", "<code", "</code"}, html


class TestCurve:
    @pytest.mark.parametrize("title", ["GRPO on $\\bad{$", "$1 < $2", f"_a_ {IMG}"])
    def test_a_name_is_no_formula(self, tmp_path, title):
        history = [{"rollout/steps": 1.0, "rollout/success": 0.5}]
        plot_learning_curve(history, tmp_path / "curve.png", title=title)
        assert (tmp_path / "curve.png").stat().st_size
