"""The benchmarks run, and what they compare is what they say."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import make_tool_caller
import make_worlds
import pytest
import torch
from tensordict import TensorDict
from waiting import LIMIT

from torchrl_llm import keys
from torchrl_llm.modules import TokenScorer, enable_prefix_sharing
from torchrl_llm.objectives import ReBN

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
QUICK = ["--max-iterations=2", "--batch-size=16", "--num-envs=16", "--final-episodes=16", "--evaluation-episodes=16"]


def run(*words: str) -> dict:
    """What a benchmark prints as JSON, in a process of its own."""
    command = [sys.executable, f"benchmarks/{words[0]}", *words[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("{") :])


def names_of(tree: ast.Module) -> set[str]:
    """What a module defines, assigns or imports anywhere."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


class TestBenchmarks:
    def test_what_scripts_import_of_each_other_is_there(self):
        """Also in those that take too long, or need too much, to run here."""
        trees = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "benchmarks").glob("*.py")}
        taken = [
            (script, node.module, alias.name)
            for script, tree in trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module in trees
            for alias in node.names
        ]
        assert len(taken) > 20
        assert [each for each in taken if each[2] not in names_of(trees[each[1]])] == []

    def test_learning(self, load, tmp_path, monkeypatch):
        arguments = ["--algo=GRPO", "--seed=3", f"--output-dir={tmp_path}", *QUICK, "--save-checkpoints=false"]
        monkeypatch.setattr(sys, "argv", ["learning.py", *arguments])
        load("learning").main()
        result = json.loads((tmp_path / "result.json").read_text())
        assert (result["algo"], result["seed"], result["iterations"]) == ("GRPO", 3, 2)

    @pytest.mark.extra
    def test_learning_in_another_world(self, load, tmp_path, monkeypatch):
        """Seeds of a world: each run starts from the world's model, and the summary states the
        optimum."""
        script = load("learning")
        model, tokenizer = make_worlds.make(
            "coins", seed=0, recipe=make_worlds.Recipe(careful_steps=1, forgetful_steps=0)
        )
        monkeypatch.chdir(tmp_path)
        make_worlds.save(model, tokenizer, tmp_path / "runs" / "worlds" / "coins")
        arguments = [
            "--world=coins",
            "--algo=GRPO",
            "--seeds=1",
            "--draw=x",
            *QUICK,
            "--max-iterations=5",
        ]  # a moving mean of 5
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setattr(sys, "argv", ["learning.py", *arguments])
        script.main()
        out = tmp_path / "runs" / "learning" / "x-coins"
        summary = json.loads((out / "summary.json").read_text())
        assert summary["optimum"] == 1.0
        assert "The best policy succeeds in 1.000 of the episodes" in (out / "summary.md").read_text()
        (result,) = [json.loads(path.read_text()) for path in out.glob("GRPO-*/result.json")]
        assert result["env_name"] == "world:coins"
        assert result["turns_after"] == 5
        assert [each for each in summary if each != "optimum"] == ["GRPO"]
        (published,) = json.loads((out / "runs.json").read_text())["GRPO"]
        assert (published["seed"], published["success_after"]) == (result["seed"], result["success_after"])
        assert len(published["wins"]) == len(published["games"]) == result["iterations"]
        times = [path.stat().st_mtime_ns for path in out.glob("GRPO-*/result.json")]
        script.main()
        assert times == [path.stat().st_mtime_ns for path in out.glob("GRPO-*/result.json")]
        monkeypatch.setattr(sys, "argv", ["learning.py", *arguments, "--lr-actor=0.1"])
        with pytest.raises(SystemExit, match=r"other settings: lr_actor was 0.0015, is 0.1. Give another --output-dir"):
            script.main()

    def test_learning_with_tools(self, load, tmp_path, monkeypatch):
        """The example's settings, whatever the algorithm, and its tools."""
        script, recipe = load("learning"), make_worlds.Recipe(careful_steps=25, forgetful_steps=0, warmup=5)
        monkeypatch.chdir(tmp_path)
        make_worlds.save(*make_tool_caller.make(seed=0, recipe=recipe), tmp_path / "runs" / "tool_caller")
        monkeypatch.setattr(sys, "argv", ["learning.py", "--world=coding-tools", "--algo=LLMREINFORCE", *QUICK])
        script.main()
        out = tmp_path / "runs" / "learning" / "coding-tools" / "LLMREINFORCE-0"
        result = json.loads((out / "result.json").read_text())
        assert (result["algo"], result["env_name"], result["iterations"]) == ("LLMREINFORCE", "coding-tools", 2)
        assert "\ntarget_kl: 0.01" in (out / "config.yaml").read_text().replace("  ", "")
        assert script.optimum_of("coding-tools") == 1.0
        assert "<tool_call>" in (out / "episodes.md").read_text()

    def test_an_interrupted_run_of_learning_begins_again(self, load, tmp_path):
        script = load("learning")
        assert not script.is_finished(tmp_path)
        for after, finished in ((None, False), (0.0, True), (0.98, True)):
            (tmp_path / "result.json").write_text(json.dumps({"success_after": after}))
            assert script.is_finished(tmp_path) == finished

    def test_learning_scales_the_turns_of_a_world(self, load, tmp_path, monkeypatch):
        script = load("learning")
        monkeypatch.setattr(script, "make_model", lambda world: tmp_path / world)
        config = CONFIGS / "tiny_grpo_multiturn.yaml"
        assert script.world_overrides("guess", config) == []
        assert "--max-steps=200000" in script.world_overrides("coins", config)
        assert "--max-steps=160000" in script.world_overrides("key-and-door", config)
        assert "--max-steps=40000" in script.world_overrides("tally", config)

    @pytest.mark.extra
    def test_the_page_on_memory_has_the_estimates(self, load):
        script, page = load("memory"), (ROOT / "docs" / "memory.md").read_text()
        for lora_r, trained in ((16, "LoRA, rank 16"), (0, "all weights")):
            cells = re.search(rf"\| 135M \| {trained} (\|.*)", page)[1]
            shown = [int(each.replace(",", "")) for each in re.findall(r"\(([\d,]+)\)", cells)]
            assert shown == [script.estimated("135M", lora_r, budget) for budget in script.BUDGETS]

    @pytest.mark.extra
    def test_iteration(self, load, tmp_path, monkeypatch):
        peer = shlex.join([sys.executable, "-c", _PEER])
        arguments = ["--algo=LLMPPO", "--iterations=1", f"--output={tmp_path / 'out.json'}", f"--peer-cmd={peer}"]
        monkeypatch.setattr(sys, "argv", ["iteration.py", *arguments])
        script = load("iteration")
        monkeypatch.setattr(script, "ALONE", 1)
        raw_learn, mark = script.raw_learn, [500]

        def greedy_raw_learn(*given) -> None:
            mark[0] = 9000
            raw_learn(*given)

        monkeypatch.setattr(script, "raw_learn", greedy_raw_learn)
        monkeypatch.setattr(script.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=1024 * mark[0]))
        script.main()
        result = json.loads((tmp_path / "out.json").read_text())
        wanted = {"rollout_tok_cpu_s", "learn_tok_cpu_s", "cpu_s_per_iteration", "peak_rss_mb", "padding_share"}
        assert wanted | {"rollout_of_raw", "learn_of_raw"} <= set(result)
        assert result["peak_rss_mb"] == 500  # ours, not the memory of the raw limits
        assert result["peak_rss_ratio"] == 125
        assert result["rollout_ratio"] == pytest.approx(result["rollout_tok_cpu_s"] / 2, rel=1e-3)


class TestLearn:
    ROWS = (2_048, 12, 5, 4, 2)

    def test_all_variants_have_one_loss(self, load):
        script = load("learn")
        model, rows = script.make_model("0.66M", 2), script.make_rows(*self.ROWS)
        by_hand = script.by_hand(model, rows, entropy=True)
        plain = script.scored(TokenScorer(model, entropy=True), rows)
        sharing = enable_prefix_sharing(model)
        assert sharing is not None
        shared = script.scored(TokenScorer(model, entropy=True, prefixes=sharing), rows)
        torch.testing.assert_close(torch.stack([plain, shared]), by_hand.expand(2), rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize(("variant", "computed"), [("by hand", 1.0), ("rows", 1.0), ("shared", None)])
    def test_counts_what_is_computed(self, load, variant, computed):
        script = load("learn")
        options = {"model": "0.66M", "layers": 2, "prompt": 200, "response": 10, "group": 8, "groups": 1}
        result = script.measure(variant, SimpleNamespace(**options, frozen_head=True, no_entropy=True, updates=1))
        assert result["computed"] == pytest.approx((200 + 80) / (8 * 210) if computed is None else computed, abs=0.01)


class TestEpisodes:
    @pytest.mark.parametrize(
        ("game", "legal"),
        [("TowerofHanoi", "you moved disk"), ("Minesweeper", "you added a flag"), ("Game2048", "you moved")],
    )
    def test_the_player_is_legal(self, load, game, legal):
        """The games say so of each move."""
        script = load("episodes")
        rows = script.collect_game(game, 2, 1)
        assert script.shape(rows)["turns"] == 8
        tokenizer = script.train_tokenizer(*script.GAMES[game])
        text = tokenizer.decode(rows[keys.TOKENS][0][rows[keys.ATTENTION_MASK][0]])
        assert text.count(legal) == 8
        assert set(rows[keys.TURN_STOP_REASON][:, -1].tolist()) == {int(keys.StopReason.MAX_TURNS)}

    def test_tells_what_is_shared(self, load):
        tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 0], [7, 0, 0, 0]])
        turns = {"turn": {"mask": torch.ones(3, 2).bool()}}
        rows = TensorDict({"tokens": tokens, "attention_mask": tokens > 0, **turns}, [3])
        assert load("episodes").shape(rows) == {"rows": 3, "tokens": 8, "shared": round(8 / 6, 3), "turns": 2.0}


class TestThinking:
    @pytest.mark.parametrize("world", ["guess", "board"])
    def test_both_forms_do_the_same(self, load, world):
        script = load("thinking")
        tokenizer = script.make_tokenizer(script.WORLDS[world])
        row = script.collect(script.WORLDS[world], tokenizer, turns=6, thinking=40)
        assert "Invalid" not in tokenizer.decode(row[keys.TOKENS][0])
        forms = script.Forms(load("learn").make_model("0.66M", 1), row)
        found = script.compare(forms, pairs=1)
        assert found["loss_gap"] < 1e-5
        assert found["gradient_gap"] < 1e-5
        # The last token of each sample is never read.
        assert found["computed"] == found["distinct"] - 6 < found["plain"] / 1.4
        assert script.distinct_tokens(script.samples(row)[:1]) - len(script.contexts(row)[0]) in range(48, 56)

    def test_what_a_policy_encodes(self, load):
        script = load("thinking")
        tokenizer = script.make_tokenizer(script.WORLDS["guess"])
        row = script.collect(script.WORLDS["guess"], tokenizer, turns=3, thinking=8)
        prompts = script.contexts(row)
        found = script.encodings(tokenizer, row, responses=2)
        assert found["prompts"] == sum(map(len, prompts))
        # Each context begins with the one before: what stands behind that is new or was dropped.
        assert found["encoded"] == found["behind_dropped"] == len(prompts[-1])


class TestGuards:
    def test_the_floor_of_the_standard_deviation(self, load):
        script = load("guards")
        rows = TensorDict({"turn": {}}, [4])
        mask = torch.ones(4, 1).bool()
        narrow, wide = (scale * torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]) for scale in (0.01, 5.0))
        compare = [make(ddof=1).compare for make in (ReBN, script.FlooredReBN)]
        zero = torch.zeros(4, 1)
        torch.testing.assert_close(*(each(rows, wide, zero, mask) for each in compare))
        plain, floored = (each(rows, narrow, zero, mask) for each in compare)
        torch.testing.assert_close(floored, narrow / script.FLOOR)
        assert plain.abs().min() > 0.8

    def test_the_bound_on_spikes(self, load):
        script = load("guards")
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        script.bound_spikes(SimpleNamespace(trainer=SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))))
        moved = []
        for gradient in (1.0, 100.0, 100.0, 0.5):
            weight.grad = torch.tensor([gradient])
            before = weight.item()
            optimizer.step()
            moved.append(before - weight.item())
        assert moved == pytest.approx([1.0, 1.5, 1.575, 0.5], rel=1e-5)

    @pytest.mark.extra
    def test_the_table(self, load, tmp_path, monkeypatch, capsys):
        script = load("guards")
        learning = load("learning")
        settings = learning.settings
        monkeypatch.setattr(learning, "settings", lambda *given: settings(*given[:4], [*given[4], *QUICK]))
        monkeypatch.setattr(learning, "WINDOW", 1)
        for guard in ("floor", "amsgrad"):
            script.train_one(guard, 5, tmp_path / f"{guard}-5")
        script.train_all(["floor", "amsgrad"], [5], tmp_path, jobs=1)
        lines = (tmp_path / "summary.md").read_text().splitlines()
        assert [line.split(" | ")[0] for line in lines[2:]] == ["| floor", "| amsgrad"]


@pytest.mark.vllm
def test_rollouts():
    """Every contender delivers the same ids, or the script fails."""
    pytest.importorskip("vllm", reason="needs vLLM: run make test-vllm")
    result = run("rollout.py", "--quick")
    assert result["instant"]["contenders"].keys() == {"stock", "barrier", "async", "hf", "policy", "raw"}


_PEER = 'print("noise"); print(\'{"rollout_tok_cpu_s": 2, "learn_tok_cpu_s": 3, "peak_rss_mb": 4}\')'
