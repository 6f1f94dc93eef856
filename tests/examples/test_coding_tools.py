"""examples/coding_tools.py and the model that it starts from: three tools, judged by hidden
tests."""

import itertools
import json
import random
import subprocess
from pathlib import Path

import coding_tools
import make_tool_caller as maker
import pytest
from make_tiny_guess import Recipe

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import ChatFormatter, GEMEnv, Response
from torchrl_llm.envs.tool_calls import ToolCall
from torchrl_llm.metrics.rollouts import rollout_metrics
from torchrl_llm.runs import parse_settings
from torchrl_llm.runs.table import read_metrics
from torchrl_llm.testing.policies import ScriptedPolicy

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "tiny_coding_tools.yaml"
QUICK = ["--max-iterations=2", "--batch-size=16", "--num-envs=16", "--final-episodes=16", "--evaluation-interval=0"]
QUICK += ["--progress=false"]


@pytest.fixture(scope="module")
def tokenizer():
    return maker.make_tokenizer()


def one(rows):
    """The only batch."""
    (found,) = rows
    return found


def collected(tokenizer, answers):
    """The rows of one episode with these answers."""
    env = GEMEnv(coding_tools.CODING, tokenizer=tokenizer, num_envs=1, max_model_len=900, max_output_tokens=200)
    policy = ScriptedPolicy(lambda _, turn, __: answers[turn], tokenizer=tokenizer, max_output_tokens=200)
    return one(TurnCollector(env, policy, batch_size=1, total_batches=1))


def started(program):
    """The environment with its tools, in an episode that hides this program."""
    env = coding_tools.CODING.make()
    for seed in itertools.count():
        env.reset(seed=seed)
        if env.hidden_state() == program:
            return env


def call(env, name, **arguments):
    """What a call says, and whether it is a fault."""
    text, reward, terminated, _, info = env.step(Response("...", calls=(ToolCall(name, arguments),)))
    assert (reward, terminated) == (0.0, False)
    return text, bool(info["tool_faults"])


class TestEnvironment:
    def test_the_scripted_player_succeeds_in_all_tasks(self, tokenizer):
        rows = one(maker.episodes(tokenizer, maker.solve, games=300, batches=1, seed=0))
        assert rows[keys.TURN_SUCCESS].any(-1).all()
        assert rows[keys.TURN_MASK].sum(-1).unique().tolist() == [3]
        assert rollout_metrics(rows)["data/tool_faults"] == 0.0
        env = coding_tools.CODING.make()
        tasks = set()
        for seed in range(300):
            env.reset(seed=seed)
            tasks.add(env.hidden_state())
        assert tasks == set(maker.PROGRAMS)

    @pytest.mark.parametrize("hidden", [("plus", 3), ("times", 3), ("minus", 3)])
    def test_a_program_has_to_agree_on_all_digits(self, hidden):
        function = [coding_tools.apply(hidden, x) for x in range(10)]
        for program in maker.PROGRAMS:
            env = started(hidden)
            assert call(env, "write", operation=program[0], number=program[1]) == ("Written.", False)
            _, reward, terminated, _, info = env.step(Response("Done."))
            agrees = [coding_tools.apply(program, x) for x in range(10)] == function
            assert (reward, terminated, info["success"]) == (float(agrees), True, agrees)

    def test_without_a_program_it_fails(self):
        env = started(("plus", 0))
        assert env.step(Response("Done."))[1] == 0.0

    def test_a_program_does_not_outlive_its_episode(self):
        env = started(("plus", 0))
        call(env, "write", operation="plus", number=0)
        env.reset(seed=0)
        assert call(env, "run", x=0) == ("Error: There is no program.", True)

    def test_tools_do_not_reach_the_tests(self):
        """Not by name, nor by what they say of a right and a wrong program; and there are fewer
        calls than digits."""
        assert [tool["function"]["name"] for tool in coding_tools.CODING.tools] == ["ask", "write", "run"]
        env = started(("times", 7))
        for name in ("step", "reset", "hidden_state", "_hidden", "apply", "__init__"):
            text, fault = call(started(("times", 7)), name)
            assert fault
            assert text.startswith("Error: There is no tool ")
        said = [call(env, "write", operation="times", number=number) for number in (7, 8)]
        assert said[0] == said[1]
        assert [call(env, "run", x=x)[0] for x in (1, 2)] == ["8", "6"]  # of the program
        assert call(env, "ask", x=2) == ("4", False)
        assert coding_tools.CODING.make().max_calls < 10

    def test_what_is_malformed_is_counted(self, tokenizer):
        ask = maker.call("ask", x=1)
        wrong = [
            ask.removesuffix("\n</tool_call>"),
            ask.replace("{", "", 1),
            maker.call("ask", x="1"),
            maker.call("ask", x=12),
            maker.call("write", operation="divide", number=1),
            maker.call("run", x=1),
        ]
        for answer in wrong:
            metrics = rollout_metrics(collected(tokenizer, [answer, "Done."]))
            assert (metrics["data/tool_calls"], metrics["data/tool_faults"]) == (1.0, 1.0), answer
        metrics = rollout_metrics(collected(tokenizer, [ask, *[maker.ask(0, 1, 2)] * 2, "Done."]))
        # beyond the most calls
        assert (metrics["data/tool_calls"], metrics["data/tool_faults"]) == (7.0, 1.0)


def answers_in(ids, mask):
    """The ids of each answer: of each run of the mask."""
    runs = itertools.groupby(zip(ids, mask, strict=True), key=lambda each: each[1])
    return [[token for token, _ in run] for learned, run in runs if learned]


def messages_of(ids, answers, formatter):
    """An episode as messages: answers with their calls, and what stands between them."""
    parts = formatter.tokenizer.decode(ids).split("<|im_start|>")[2:]
    others = [part.removesuffix("<|im_end|>\n").split("\n", 1) for part in parts if not part.startswith("assistant")]
    others = iter([{"role": role, "content": content} for role, content in others])
    messages = [next(others)]
    for answer in answers:
        response = formatter.decode(answer)
        calls = [{"type": "function", "function": each._asdict()} for each in response.calls]
        messages.append({"role": "assistant", "content": "" if calls else str(response), "tool_calls": calls})
        messages += itertools.islice(others, max(1, len(calls)))
    assert next(others, None) is None
    return messages


class TestModel:
    def test_what_is_cloned_is_what_the_template_renders(self, tokenizer):
        """Token for token, with calls and results as messages; and all answers are learned, to
        their ends."""
        formatter, kinds = ChatFormatter(tokenizer, tools=coding_tools.CODING.tools), set()
        for ids, mask in maker.examples(tokenizer, Recipe(careful_steps=1, forgetful_steps=1, games=64), seed=0):
            for row, learned in zip(ids, mask, strict=True):
                tokens = row[row != tokenizer.pad_token_id].tolist()
                answers = answers_in(row.tolist(), learned.tolist())
                messages = messages_of(tokens, answers, formatter)
                rendered = tokenizer.apply_chat_template(
                    messages, tools=[*formatter.tools], tokenize=False, add_generation_prompt=True
                )
                assert tokens == tokenizer.encode(rendered, add_special_tokens=False)
                assert len(answers) == rendered.count("assistant\n") - 1
                assert all(answer[-1] == tokenizer.eos_token_id for answer in answers)
                kinds |= {call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
        assert kinds == {"ask", "write", "run"}

    def test_the_forgetful_player_fails_about_half_of_the_time(self, tokenizer):
        player = maker.forgetful(maker.RECIPE.forget, random.Random(0))
        rows = one(maker.episodes(tokenizer, player, games=300, batches=1, seed=0))
        assert 0.35 < rows[keys.TURN_SUCCESS].any(-1).float().mean() < 0.65
        assert not rows[keys.TURN_TRUNCATED].any()

    def test_a_call_is_few_tokens(self, tokenizer):
        lengths = [
            len(tokenizer.encode(text)) for text in (maker.ask(0), maker.write(("plus", 1)), maker.call("run", x=1))
        ]
        assert lengths == [5, 5, 5]

    def test_it_is_small_and_can_be_made_again(self):
        recipe = Recipe(careful_steps=2, forgetful_steps=1, games=8)
        (first, words), (second, _) = (maker.make(seed=3, recipe=recipe) for _ in range(2))
        assert 100_000 <= first.num_parameters() <= 200_000
        assert first.config.vocab_size == len(words)
        pairs = zip(first.parameters(), second.parameters(), strict=True)
        assert all((one == other).all() for one, other in pairs)


class TestScript:
    @pytest.fixture
    def elsewhere(self, tmp_path, monkeypatch):
        """The model that the script starts from has learned next to nothing."""
        monkeypatch.chdir(tmp_path)
        model, tokenizer = maker.make(seed=0, recipe=Recipe(careful_steps=25, forgetful_steps=0, games=16, warmup=5))
        maker.save(model, tokenizer, tmp_path / "runs" / "tool_caller")
        return tmp_path

    @pytest.mark.parametrize("algo", ["LLMPPO", "LLMREINFORCE", "GRPO"])
    def test_trains_and_compares(self, elsewhere, algo, capsys):
        result = coding_tools.main(parse_settings([f"--config={CONFIG}", f"--algo={algo}", *QUICK]))
        out = elsewhere / "runs" / "coding_tools"
        assert json.loads((out / "result.json").read_text()) == json.loads(json.dumps(result))
        assert (result["algo"], result["episodes"], result["iterations"]) == (algo, 32, 2)
        shown = capsys.readouterr().out
        assert "\nbefore " in shown
        assert "\nafter " in shown
        assert sum(row["data/tool_calls"] for row in read_metrics(out / "metrics.csv")) > 0
        assert "<tool_call>" in (out / "episodes.md").read_text()

    def test_makes_its_model_once(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        made = []

        def run(command, check):
            made.append(command)
            assert Path(command[1]).samefile(maker.__file__)
            assert check
            Path(command[2].removeprefix("--out=")).mkdir(parents=True)

        monkeypatch.setattr(subprocess, "run", run)
        assert coding_tools.small_model() == coding_tools.small_model() == Path("runs/tool_caller")
        assert len(made) == 1
        assert [each.name for each in (tmp_path / "runs").iterdir()] == ["tool_caller"]

    @pytest.mark.slow
    @pytest.mark.extra
    def test_learns(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        arguments = ["--max-iterations=10", "--evaluation-interval=0", "--save-checkpoints=false", "--progress=false"]
        result = coding_tools.main(parse_settings([f"--config={CONFIG}", *arguments]))
        assert 0.25 < result["success_before"] < 0.65
        assert result["success_after"] > 0.85
