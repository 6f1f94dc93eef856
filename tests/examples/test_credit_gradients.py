"""The comparison of gradients in the credit study: continuations are of the states they stand at,
and all else is as without them."""

import json
from pathlib import Path

import pytest
import torch

from torchrl_llm import functional as F
from torchrl_llm import keys
from torchrl_llm.modules import TokenScorer
from torchrl_llm.testing.enumerable import EnumerableMDP, tiny_lm

ROOT = Path(__file__).parents[2]


@pytest.fixture
def game(load):
    """An enumerable game of :data:`credit_study.gradients.GAMES`, its policy, and the continuations
    of its states."""
    mdp = EnumerableMDP(game=load("credit_study.gradients").unequal, max_turns=None)
    actor = TokenScorer(tiny_lm(0))
    return mdp, actor, load("credit_study.continuations").Continuations.of(mdp, actor)


def sample(continuations, index, count, group=4, seed=0):
    return continuations.sample(index, group, count, torch.Generator().manual_seed(seed))


class TestContinuations:
    def test_their_mean_is_the_exact_value_of_the_state(self, game):
        """Each episode is a batch of its own; 20,000 continuations leave an error of about 0.01."""
        mdp, actor, continuations = game
        rows = mdp.rows()
        turn_ids, turns = rows[keys.TURN_IDS], rows[keys.TURN_MASK].shape[1]
        exact = F.turn_first(mdp.state_values(actor)[0], turn_ids, turns)
        value = sample(continuations, torch.arange(len(rows)).unsqueeze(1), 20_000, group=1).squeeze(1)
        acted = torch.stack([(turn_ids == turn).any(1) for turn in range(turns)], 1)
        assert torch.equal(value.isnan(), ~acted)
        torch.testing.assert_close(value[acted], exact[acted], rtol=0, atol=0.05)
        assert exact[acted].std() > 0.5  # a value of another state would be far off

    def test_more_of_them_have_less_noise(self, game):
        *_, continuations = game
        index = torch.zeros(4000, 1, dtype=torch.int64)
        once, four = (sample(continuations, index, count, group=1)[:, 0, 0].var().item() for count in (1, 4))
        assert four == pytest.approx(once / 4, rel=0.15)

    def test_a_group_shares_the_value_of_a_state_and_others_do_not(self, game):
        *_, continuations = game
        value = sample(continuations, torch.zeros(200, 8, dtype=torch.int64), 1)[..., 0]
        assert torch.equal(value, value.view(200, 2, 4)[..., :1].expand(200, 2, 4).reshape(200, 8))
        first, second = value[:, 0], value[:, 4]
        assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.25

    def test_the_turns_they_cost(self, game):
        """One state twice in a group is continued once, in two groups twice."""
        mdp, actor, continuations = game
        rows, probability = mdp.rows(), mdp.log_probability(actor).detach().exp()
        acted = torch.stack([(rows[keys.TURN_IDS] == turn).any(1) for turn in range(3)], 1).sum(1)
        one = int((acted == 1).nonzero()[0])
        same_task = rows[keys.GROUP_ID] == rows[keys.GROUP_ID][one]
        expected = float((probability * acted)[same_task].sum() / probability[same_task].sum())
        own, continued = continuations.cost(torch.full((3, 8), one), 4)
        assert own == 8
        assert continued == pytest.approx(2 * expected)


class TestCompareGradients:
    @pytest.mark.extra
    def test_continuations_change_nothing_else(self, load, monkeypatch):
        """The other estimators' figures are the same to the last bit, and the noise falls with the
        number of continuations."""
        gradients = load("credit_study.gradients")
        some = [
            each
            for each in gradients.ESTIMATORS
            if each.name in ("returns to go", "ReBN") or isinstance(each.critic, int)
        ]
        monkeypatch.setattr(gradients, "ESTIMATORS", some)
        found = {each["estimator"]: each for each in gradients.compare_gradients("unequal tasks", 1, 200, [8])}
        monkeypatch.setattr(gradients, "ESTIMATORS", [each for each in some if not isinstance(each.critic, int)])
        without = gradients.compare_gradients("unequal tasks", 1, 200, [8])
        assert without == [found[each["estimator"]] for each in without]
        one, four = found["continuations, 1"], found["continuations, 4"]
        assert four["noise"] < one["noise"] < found["returns to go"]["noise"]
        assert four["cosine_mean"] == pytest.approx(1.0, abs=0.02)
        own = found["ReBN"]["turns"]
        assert four["turns"] - own == pytest.approx(4 * (one["turns"] - own))


class TestReport:
    def test_writes_the_parts_that_there_are_data_of(self, load, tmp_path, monkeypatch, capsys):
        credit, gradients = load("credit"), load("credit_study.gradients")
        page = tmp_path / "page.md"
        page.write_text(
            "<!-- gradients, equal tasks -->\n\n<!-- gradients, unequal tasks -->\n\n<!-- machine -->\n\n| old |\n"
        )
        monkeypatch.setattr(credit, "PAGE", page)
        monkeypatch.setattr(credit, "PLOTS", tmp_path / "plots")
        with pytest.raises(SystemExit, match=r"has the data of no part of page\.md"):
            credit.write_report(tmp_path)
        figures = {"cosine_mean": 1.0, "cosine_batch": 0.5, "noise": 0.25}
        results = [
            {"game": game, "estimator": each.name, "policy": 0, "size": size} | figures
            for game in gradients.GAMES
            for each in gradients.ESTIMATORS
            for size in (8, 32)
        ]
        (tmp_path / "gradients.json").write_text(json.dumps(results))
        credit.write_report(tmp_path)
        said = capsys.readouterr().out
        assert f"sweeps: {tmp_path} has no sweeps.json; its tables and plots stay as they are." in said
        assert f"learning: {tmp_path} has no guess and no early;" in said
        assert page.read_text().count("| continuations, 4 | 1.000 (1.000 to 1.000) |") == 2
        assert "| old |" in page.read_text()
        assert [each.name for each in (tmp_path / "plots").iterdir()] == ["gradients.png"]
