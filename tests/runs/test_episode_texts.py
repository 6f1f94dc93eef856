"""Recorded episodes as text: who wrote what, which ones, how long, and nothing that acts where it
is shown."""

from html.parser import HTMLParser

import pytest
import torch
from recorded_runs import PAYLOADS, made_rows, write_rows
from tensorboard.plugin_util import markdown_to_safe_html

from torchrl_llm import keys
from torchrl_llm.runs.episode_texts import COLUMNS, Message, episode_texts, markdown, shortened, table_rows
from torchrl_llm.runs.outputs import NEXT_SEGMENT
from torchrl_llm.runs.recording import read_recording
from torchrl_llm.utils.terminal import visible

BREAKING = ("```\n<b>out</b>\n", "\n~~~~\n# title\n", "| a |\n|---|\n", "[x](javascript:alert(1))", "\n    code\n")


def recorded(tmp_path, rows, **changes):
    return read_recording(write_rows(tmp_path, rows, **changes))


class Blocks(HTMLParser):
    """The texts of code blocks, and the tags of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self._in = set(), [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self._in = tag == "code"
        self.texts += [""] * self._in

    def handle_endtag(self, tag):
        self._in = self._in and tag != "code"

    def handle_data(self, data):
        if self._in:
            self.texts[-1] += data


def test_each_side_has_its_words_in_order(tmp_path):
    rows = made_rows(2, turns=2, length=8)
    (first, second) = episode_texts(recorded(tmp_path, rows), 9)
    words = [f" word{token}" for token in rows[keys.TOKENS][0].tolist()]
    sides = ["".join(words[i : i + 2]) for i in (0, 2, 4, 6)]
    assert [*first.messages] == [*zip(["user", "assistant"] * 2, sides, strict=True)]
    assert (first.outcome, first.reward) == ("lost after 2 turns, rewards 0, 0", 0.0)
    assert (second.outcome, second.reward, second.turns) == ("won after 2 turns, rewards 0, 1", 1.0, 2)
    assert first.env == "game:Guess"


def test_tasks_take_turns(tmp_path):
    recording = recorded(tmp_path, made_rows(6, groups=2))
    assert [each.task for each in episode_texts(recording, 5)] == [0, 1, 0, 1, 0]
    assert len(episode_texts(recording, 9)) == 6


def test_a_context_that_was_cut_says_so(tmp_path):
    rows = made_rows(1, length=8)
    rows[keys.ATTENTION_MASK][0, 4:6] = False
    (episode,) = episode_texts(recorded(tmp_path, rows), 1)
    assert [*episode.messages][2] == ("user", NEXT_SEGMENT)
    assert len(episode.messages) == 4


def test_what_would_act_is_a_code_block(tmp_path):
    """In TensorBoard, whose page it is: the text of each block is what was written, and there is no
    markup but ours."""
    rows = made_rows(2, turns=2, length=12)
    texts = (*BREAKING, *PAYLOADS)
    rows[keys.TOKENS] = torch.arange(24).reshape(2, 12)
    recording = recorded(tmp_path, rows, pieces={token: texts[token % len(texts)] for token in range(24)})
    episodes = episode_texts(recording, 2, most=10**6)
    page = Blocks(markdown_to_safe_html(markdown(recording, episodes)))
    written = [text for each in episodes for _, text in each.messages]
    assert len(written) == 8
    assert [lines(text) for text in page.texts] == [lines(text) for text in written]
    assert page.tags <= {"h1", "h2", "p", "pre", "code"}
    assert all(visible(text) == text for text in written)


def lines(text):
    """Python's Markdown leaves out spaces of empty lines, and what is around a block."""
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("most", [10, 99, 100, 101, 10_000])
def test_length_is_bounded_and_what_is_left_out_is_said(most):
    messages = [Message("user", "a" * 50), Message("assistant", "b" * 49), Message("user", "c")] * 3
    found = shortened(messages, most)
    text, whole = "".join(each.text for each in found), "".join(each.text for each in messages)
    if most >= 300:
        assert found == messages
        return
    note = f"[... {300 - 2 * (most // 2):,} characters left out ...]"
    assert text == whole[: most // 2] + note + whole[300 - most // 2 :]
    assert {each.role for each in found if "b" in each.text} <= {"assistant"}


def test_a_table_keeps_large_numbers_of_tasks(tmp_path):
    rows = made_rows(1)
    rows[keys.TASK_ID][:] = 2**62 + 1
    recording = recorded(tmp_path, rows)
    (row,) = table_rows(recording, episode_texts(recording, 1))
    named = dict(zip(COLUMNS, row, strict=True))
    assert (named["task"], named["iteration"], named["steps"]) == (str(2**62 + 1), 1, 10)
    assert named["text"].startswith("[Environment]\n word")
